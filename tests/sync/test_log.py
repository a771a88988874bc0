"""The log in a folder: what it holds, what it refuses, and what a failing file system leaves behind."""

import errno
import json
import os
import re
from dataclasses import replace

import pytest
import torch

from logra.errors import PacketError, SyncError
from logra.sync import BaseModel, DirectoryLog, Manifest
from logra.sync.manifest import new_run_id


def names(path):
    return sorted(file.name for file in path.iterdir())


def test_updates_come_back_as_they_went_in(tools, run, log):
    assert names(log.path) == [f"{version:012d}.update" for version in range(1, 7)] + ["manifest.json"]
    for reader in (log, DirectoryLog(log.path)):
        assert reader.latest() == 6
        assert [update.digest for update in reader.read_since(0)] == [update.digest for update in run.updates]
        assert [update.version for update in reader.read_since(4)] == [5, 6]
        assert list(reader.read_since(6)) == []
    assert log.path.joinpath("000000000003.update").read_bytes() == run.updates[2].to_bytes()


def test_a_reader_follows_a_writer(tools, run, tmp_path):
    # Catches a reader that lists the folder once.
    reader = DirectoryLog(tmp_path / "updates")
    with pytest.raises(SyncError, match="holds no update log"):
        reader.latest()
    writer = DirectoryLog(tmp_path / "updates", run.manifest)
    assert (reader.latest(), reader.manifest) == (0, run.manifest)
    for update in run.updates:
        assert writer.append(update) == len(update.to_bytes())
        assert reader.latest() == update.version
    assert [update.version for update in reader.read_since(0)] == [1, 2, 3, 4, 5, 6]


def test_the_manifest_is_json_and_survives_a_round_trip(run, log):
    text = (log.path / "manifest.json").read_text()
    content = json.loads(text)
    assert content["format"] == "logra-update-log"
    assert (content["format_version"], content["packet_format_version"]) == (1, 2)
    assert content["base"]["digest"] == run.manifest.base.digest
    assert Manifest.from_json(text) == run.manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not the manifest"),
        ({"format_version": 2}, "format_version is 2"),
        ({"packet_format_version": 1}, "packet_format_version is 1"),
        ({"run_id": ""}, "run_id is ''"),
        ({"run_id": 3}, "run_id is 3"),
        ({"run_id": "a b"}, "run_id is 'a b'"),
        ({"weight_storage": "int8"}, "weight_storage is 'int8'"),
        ({"seed": True}, "seed is True"),
        ({"seed": -1}, "seed is -1"),
        ({"base": {"version": -1}}, r"base\.version is -1"),
        ({"base": {"digest": "abc"}}, r"base\.digest is 'abc'"),
        ({"base": {"model": 3}}, r"base\.model is 3"),
        ({"base": {"other": 3}}, "not known"),
        ({"base": None}, "not known"),
        ({"more": 1}, "not known"),
    ],
)
def test_a_manifest_that_is_none_is_refused(run, change, message):
    content = json.loads(run.manifest.to_json()) | change
    with pytest.raises(SyncError, match=message):
        Manifest.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_manifest_that_is_no_json_is_refused(text):
    with pytest.raises(SyncError, match="manifest"):
        Manifest.from_json(text)


def test_run_ids_differ():
    assert len({new_run_id() for _ in range(100)}) == 100


def test_gaps_duplicates_and_other_runs_are_refused(run, tmp_path):
    log = DirectoryLog(tmp_path / "updates", run.manifest)
    first, second, third = run.updates[:3]
    log.append(first)
    with pytest.raises(SyncError, match="leaves a gap"):
        log.append(third)
    for name, value in (("run_id", "other"), ("seed", run.seed + 1), ("run_id", "")):
        with pytest.raises(PacketError, match=f"{name} is"):
            log.append(replace(second, **{name: value}))
    with pytest.raises(PacketError, match="weight_storage"):
        log.append(replace(second, weight_storage="fp32" if run.storage == "split32" else "split32"))
    # The same content again is the answer to a lost acknowledgement; other content is a second run.
    log.append(first)
    with pytest.raises(SyncError, match="holds another update to version 1"):
        log.append(replace(first, tensors={"norm.weight": torch.zeros(12)}))
    assert log.latest() == 1
    log.append(second)
    assert log.latest() == 2


def test_a_log_may_begin_anywhere_and_by_itself(run, tmp_path):
    log = DirectoryLog(tmp_path / "updates")
    with pytest.raises(SyncError, match="no run id"):
        log.append(replace(run.updates[3], run_id=""))
    assert not (tmp_path / "updates").exists()
    log.append(run.updates[3])
    assert log.manifest == Manifest(
        run_id=run.updates[3].run_id, weight_storage=run.storage, seed=run.seed, base=BaseModel(version=3)
    )
    assert (log.latest(), DirectoryLog(log.path).latest()) == (4, 4)
    with pytest.raises(SyncError, match="holds versions 3 to 4"):
        next(log.read_since(2))
    with pytest.raises(SyncError, match="holds another update to version 2"):
        log.append(run.updates[1])


def test_the_folder_of_another_run_is_refused(run, log, tmp_path):
    for other in (
        replace(run.manifest, run_id="other"),
        replace(run.manifest, base=replace(run.manifest.base, digest="0" * 64)),
    ):
        with pytest.raises(SyncError, match="cannot become"):
            DirectoryLog(log.path, other)
    assert DirectoryLog(log.path, run.manifest).latest() == 6
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("x")
    with pytest.raises(SyncError, match=r"holds other files \('notes.txt'\)"):
        DirectoryLog(foreign)
    (foreign / "notes.txt").rename(foreign / ".tmp-0123")  # what a killed writer leaves
    DirectoryLog(foreign, run.manifest)
    assert names(foreign) == ["manifest.json"]


def test_missing_files_are_found(run, log):
    (log.path / "000000000002.update").unlink()
    with pytest.raises(SyncError, match=r"versions \[2\] are missing"):
        DirectoryLog(log.path).latest()
    reader = log.read_since(0)
    assert next(reader).version == 1
    with pytest.raises(SyncError, match="version 2 cannot be read"):
        next(reader)


def test_renamed_files_are_found(run, log):
    (log.path / "000000000002.update").write_bytes(run.updates[2].to_bytes())
    with pytest.raises(PacketError, match="holds the update to version 3"):
        log.read(2)


def test_files_of_another_run_are_found(run, log):
    # Catches a reader that trusts the folder: a packet that is whole, in its place, and of another run.
    for name, value in (("run_id", "other"), ("seed", run.seed + 1)):
        (log.path / "000000000002.update").write_bytes(replace(run.updates[1], **{name: value}).to_bytes())
        with pytest.raises(PacketError, match=f"version 2: {name} is"):
            log.read(2)


# ---- the file system fails


class FailingDisk:
    """os.write, os.fsync and os.rename that fail at one call, counted over all three."""

    def __init__(self, monkeypatch, fail_at: int, number: int = errno.ENOSPC) -> None:
        self.calls: list[str] = []
        for name in ("write", "fsync", "rename"):
            original = getattr(os, name)

            def failing(*args, name=name, original=original):
                self.calls.append(name)
                if len(self.calls) == fail_at:
                    if name == "write":
                        original(args[0], bytes(args[1])[:10])  # a full disk takes a part
                    raise OSError(number, os.strerror(number))
                return original(*args)

            monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_full_disk_leaves_a_readable_log(run, tmp_path, monkeypatch, fail_at):
    # Catches a torn file under its final name, temporary files that pile up, and an error that does not say what to do.
    log = DirectoryLog(tmp_path / "updates", run.manifest)
    log.append(run.updates[0])
    with monkeypatch.context() as patch:
        disk = FailingDisk(patch, fail_at)
        with pytest.raises(
            SyncError, match=r"No space left on device.*free some space and publish the same update once"
        ):
            log.append(run.updates[1])
    assert disk.calls == ["write", "fsync", "rename", "fsync"][:fail_at]
    reader = DirectoryLog(log.path)
    assert [update.digest for update in reader.read_since(0)] == [u.digest for u in run.updates[: reader.latest()]]
    # After the rename the update is there, only not acknowledged.
    assert reader.latest() == (2 if fail_at == 4 else 1)
    assert not any(name.startswith(".tmp-") for name in names(log.path))
    for update in run.updates[1:]:
        log.append(update)
    assert DirectoryLog(log.path).latest() == 6


def test_an_append_that_is_repeated_is_made_durable(run, tmp_path, monkeypatch):
    # Catches a repetition that finds the file and acknowledges it although the folder was never fsynced.
    log = DirectoryLog(tmp_path / "updates", run.manifest)
    with monkeypatch.context() as patch:
        FailingDisk(patch, 4, errno.EIO)
        with pytest.raises(SyncError, match="writable again"):
            log.append(run.updates[0])
    with monkeypatch.context() as patch:
        disk = FailingDisk(patch, 99)
        log.append(run.updates[0])
    assert disk.calls == ["fsync"]


def test_the_order_of_the_steps_is_the_durable_one(run, tmp_path, monkeypatch):
    # Catches a rename before the data is on disk, and an answer before the folder is.
    disk = FailingDisk(monkeypatch, 99)
    DirectoryLog(tmp_path / "updates", run.manifest).append(run.updates[0])
    assert disk.calls == ["write", "fsync", "rename", "fsync"] * 2


def test_a_full_disk_at_the_start(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        FailingDisk(patch, 1)
        with pytest.raises(SyncError, match="starting the log"):
            DirectoryLog(tmp_path / "updates", run.manifest)
    assert DirectoryLog(tmp_path / "updates", run.manifest).latest() == 0


# ---- anchors


def test_anchors_come_back_as_they_went_in(tools, run, log):
    views = {name: value.T.contiguous().T if value.ndim == 2 else value for name, value in run.weights[4].items()}
    log.write_anchor(4, views)
    log.write_anchor(2, run.weights[2])
    tools.assert_same_bits(log.read_anchor(4), run.weights[4])
    assert [log.latest_anchor(version) for version in (1, 2, 3, 4, 9)] == [None, 2, 2, 4, 4]
    assert DirectoryLog(log.path).latest() == 6  # the folder of anchors is no surplus file
    log.write_anchor(4, run.weights[4])
    with pytest.raises(SyncError, match="other weights"):
        log.write_anchor(4, run.weights[3])
    for version in (7, -1):
        with pytest.raises(SyncError, match="no version"):
            log.write_anchor(version, run.weights[4])


def test_anchors_keep_the_dtype_of_other_tensors(log):
    log.write_anchor(1, {"norm.weight": torch.ones(3, dtype=torch.bfloat16), "w": torch.ones(2, 2)})
    assert {name: value.dtype for name, value in log.read_anchor(1).items()} == {
        "norm.weight": torch.bfloat16,
        "w": torch.float32,
    }


def test_damaged_anchors_are_refused(run, log):
    # safetensors has no checksum: the digest in the metadata must catch every flipped bit of the data.
    log.write_anchor(4, run.weights[4])
    path = log.path / "anchors" / "000000000004.safetensors"
    data = path.read_bytes()
    for position in [*range(0, len(data), 97), len(data) - 1]:
        damaged = bytearray(data)
        damaged[position] ^= 4
        path.write_bytes(bytes(damaged))
        with pytest.raises(SyncError, match="anchor"):
            log.read_anchor(4)
    path.write_bytes(data[:-7])
    with pytest.raises(SyncError, match="cannot be read"):
        log.read_anchor(4)
    with pytest.raises(SyncError, match="cannot be read"):
        log.read_anchor(3)
    (log.path / "anchors" / "000000000003.safetensors").write_bytes(data)
    with pytest.raises(SyncError, match="version 3"):
        log.read_anchor(3)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_full_disk_leaves_no_half_anchor(run, log, monkeypatch, fail_at):
    with monkeypatch.context() as patch:
        FailingDisk(patch, fail_at)  # calls: fsync of the log's folder, fsync of the file, rename, fsync of the folder
        with pytest.raises(SyncError, match="anchor of version 4"):
            log.write_anchor(4, run.weights[4])
    reader = DirectoryLog(log.path)
    assert reader.latest_anchor(6) == (4 if fail_at == 4 else None)
    log.write_anchor(4, run.weights[4])
    reader.read_anchor(4)


def test_a_full_disk_inside_safetensors_is_explained(run, log, monkeypatch):
    from safetensors import SafetensorError

    def save_file(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("logra.sync.anchor.save_file", save_file)
    with pytest.raises(SyncError, match="free some space"):
        log.write_anchor(4, run.weights[4])
    assert log.latest_anchor(6) is None


@pytest.mark.parametrize("name", ["000000000001 (copy).update", "1.update", "anchors/000000000001 (copy).safetensors"])
def test_files_that_no_log_writes_are_named(tools, run, log, name):
    (log.path / "anchors").mkdir(exist_ok=True)
    (log.path / name).touch()
    with pytest.raises(SyncError, match=re.escape(repr(name.rpartition("/")[2])) + ".*no log writes"):
        DirectoryLog(log.path).latest_anchor(6)


def test_a_file_is_no_log(tmp_path):
    (tmp_path / "updates").touch()
    with pytest.raises(SyncError, match="updates is a file"):
        DirectoryLog(tmp_path / "updates")
