"""Random faults between a trainer and its replicas: each is detected, none is applied in part, and all can be recovered."""

import hashlib
import random
import struct
from dataclasses import replace

import pytest
import torch

from logra.errors import LograError, PacketError
from logra.sync import DirectoryLog
from logra.update import PolicyUpdate

NUM_PACKET_FAULTS = 200  # for each of five kinds of replicas
NUM_FILE_FAULTS = 60


def reseal(data: bytearray) -> bytes:
    """A correct seal around changed bytes: the fault is then not damage, and must be found by what it says."""
    return bytes(data[:-32]) + hashlib.sha256(data[:-32]).digest()


def flip(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged) if bytes(damaged) != data else flip(rng, data)


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    cut = rng.randrange(90, min(len(data), len(other)))
    return data[:cut] + other[cut:]


def zeros(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) - 70)
    damaged = data[:start] + bytes(64) + data[start + 64 :]
    return damaged if damaged != data else zeros(rng, data)


def other_format(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    struct.pack_into("<I", damaged, 8, rng.choice([0, 1, 3, 2**32 - 1]))
    return reseal(damaged)


def other_header(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    struct.pack_into("<Q", damaged, rng.choice([12, 20, 28, 36, 44]), rng.randrange(2**64))
    return reseal(damaged)


def swapped_names(update: PolicyUpdate) -> PolicyUpdate:
    names = list(update.weights)
    return replace(update, weights=dict(zip(names, [*update.weights.values()][::-1], strict=True)))


def faulty_packet(rng: random.Random, run, stranger, version: int) -> tuple[str, bytes]:
    """What a replica at `version` gets in place of the update to version + 1."""
    good = run.updates[version]
    data = good.to_bytes()
    later = [update for update in run.updates if update.version > version + 1]
    earlier = [update for update in run.updates if update.version <= version]
    another = rng.choice([update for update in run.updates if update.version != version + 1])
    faults = {
        "bit flips": lambda: flip(rng, data),
        "truncated": lambda: data[: rng.randrange(len(data))],
        "extended": lambda: data + rng.randbytes(rng.randint(1, 50)),
        "spliced": lambda: splice(rng, data, another.to_bytes()),
        "a block of zeros": lambda: zeros(rng, data),
        "noise": lambda: rng.randbytes(rng.randrange(400)),
        "reordered or a gap": lambda: rng.choice(later or earlier).to_bytes(),
        "duplicate": lambda: rng.choice(earlier or later).to_bytes(),
        "another run": lambda: replace(good, run_id=rng.choice(["", "other", run.manifest.run_id + "x"])).to_bytes(),
        "another seed": lambda: replace(good, seed=rng.randrange(1, 2**63)).to_bytes(),
        "another base": lambda: replace(another, update_index=good.update_index).to_bytes(),
        "another format": lambda: other_format(rng, data),
        "another header": lambda: other_header(rng, data),
        "another model": lambda: replace(good, tensors={f"layer.{rng.randrange(9)}.weight": torch.zeros(3)}).to_bytes(),
        "swapped names": lambda: swapped_names(good).to_bytes(),
        "another trainer": lambda: stranger.updates[version].to_bytes(),
        "another merge rule": lambda: replace(
            good, weight_storage="fp32" if run.storage == "split32" else "split32"
        ).to_bytes(),
    }
    kind = rng.choice(list(faults))
    return kind, faults[kind]()


class Memory:
    """The log as a replica sees it, in memory."""

    def __init__(self, run) -> None:
        self.manifest = run.manifest
        self._packets = [update.to_bytes() for update in run.updates]

    def latest(self) -> int:
        return len(self._packets)

    def read_since(self, version: int):
        return map(PolicyUpdate.from_bytes, self._packets[version:])


@pytest.mark.parametrize("kind", ["fp32-module", "split32-module", "split24-module", "split32-shards-2", "bf16-module"])
def test_every_faulty_packet_is_detected(tools, runs, kind):
    # Catches a fault that is applied, applied in part, moves the version, or leaves a replica that cannot go on.
    rng = random.Random(kind)
    stranger = tools.Run("fp32", seed=9)
    seen = set()
    storages = ["split24"] if kind.startswith("split24") else ["fp32", "split32", "split24"]
    for case in range(NUM_PACKET_FAULTS):
        run = runs[rng.choice(storages)]
        log = Memory(run)
        version = rng.randrange(len(run.updates))
        follower = tools.build(kind, run, version)
        follower.catch_up(log, until=version)  # applies nothing; tells the replica its run, seed and merge rule
        before = {name: value.clone() for name, value in follower.weights().items()}
        fault, data = faulty_packet(rng, run, stranger, version)
        seen.add(fault)
        for replica in follower.replicas:
            with pytest.raises(PacketError):
                replica.apply(PolicyUpdate.from_bytes(data))
        assert follower.version == version, (case, fault)
        tools.assert_same_bits(follower.weights(), before)
        follower.catch_up(log, until=version + 1)
        assert follower.version == version + 1
        if kind != "bf16-module":
            tools.assert_same_bits(follower.weights(), run.weights[version + 1])
    assert len(seen) == 17


def test_every_fault_in_a_log_is_detected(tools, runs, tmp_path):
    # The same through files: a file is damaged, lost or replaced, then restored. What precedes it is applied, nothing
    # else; afterwards the replica catches up.
    rng = random.Random(1)
    stranger = tools.Run("fp32", seed=9)
    for case in range(NUM_FILE_FAULTS):
        run = runs[rng.choice(["fp32", "split32"])]
        log = DirectoryLog(tmp_path / str(case), run.manifest)
        for update in run.updates:
            log.append(update)
        version = rng.randrange(len(run.updates))
        path = log.path / f"{version + 1:012d}.update"
        good = path.read_bytes()
        fault, data = faulty_packet(rng, run, stranger, version)
        if case % 10 == 0 and version + 1 < len(run.updates):  # a log without its last file is just a shorter log
            fault, data = "lost", None
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        follower = tools.build(rng.choice(["fp32-module", "split32-shards-3"]), run)
        for replica in follower.replicas:
            with pytest.raises(LograError):
                replica.catch_up(log)
        assert follower.version == version, (case, fault)
        tools.assert_same_bits(follower.weights(), run.weights[version])
        path.write_bytes(good)
        follower.catch_up(DirectoryLog(log.path))
        tools.assert_same_bits(follower.weights(), run.weights[-1])


def test_there_are_a_thousand_cases():
    assert 5 * NUM_PACKET_FAULTS + NUM_FILE_FAULTS >= 1000
