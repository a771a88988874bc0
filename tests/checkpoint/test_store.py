"""Checkpoints on disk: complete, damaged, kept and deleted."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from logra.checkpoint import Checkpoint, CheckpointStore, store
from logra.errors import CheckpointError


def state(value):
    shared = torch.full((4,), float(value))
    return {"weights": {"a": shared, "b": shared[:2], "c": torch.ones(2, 3).T}, "seed": value}


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def test_what_was_written_comes_back(checkpoints):
    written = checkpoints.write(7, state(7), {"extra.json": "{}"})
    found, damaged = checkpoints.newest()
    assert found == written and not damaged
    read = checkpoints.read(found)
    assert read["seed"] == 7
    # Catches views of one storage, and transposed tensors, that are stored as what lies under them.
    for name, tensor in state(7)["weights"].items():
        assert torch.equal(read["weights"][name], tensor)
    assert (found.path / "extra.json").read_text() == "{}"
    assert {path.suffix for path in found.path.iterdir()} == {".json", ".safetensors", ""}


def test_a_checkpoint_of_a_step_replaces_the_one_before(checkpoints):
    checkpoints.write(3, state(1))
    checkpoints.write(3, state(2))
    found, _ = checkpoints.newest()
    assert checkpoints.read(found)["seed"] == 2
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000000000003"]


def damage_byte(path):
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(data)


DAMAGES = {
    "byte": (damage_byte, "tensors.safetensors is not what was written"),
    "short": (lambda path: os.truncate(path / "state.json", 5), "state.json is not what was written"),
    "missing": (lambda path: (path / "state.json").unlink(), "state.json' is missing"),
    "no marker": (lambda path: (path / store.MARKER).unlink(), "was not finished"),
    "marker": (lambda path: (path / store.MARKER).write_text("[]"), "cannot be read"),
    "empty marker": (lambda path: (path / store.MARKER).write_text(""), "cannot be read"),
    "other format": (
        lambda path: (path / store.MARKER).write_text(json.dumps({"format_version": 9, "step": 2, "files": {}})),
        "says format 9",
    ),
    "other step": (lambda path: path.rename(path.with_name("step-000000000009")), "step 2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_and_named(checkpoints, damage):
    checkpoints.write(1, state(1))
    newest = checkpoints.write(2, state(2))
    apply, what = DAMAGES[damage]
    apply(newest.path)
    found, damaged = checkpoints.newest()
    assert found is not None and found.step == 1
    (name,) = damaged
    assert name in ("step-000000000002", "step-000000000009")
    assert what in damaged[name]
    if name == newest.path.name:
        with pytest.raises(CheckpointError):
            checkpoints.find(newest.path)
        # The run that goes on from step 1 writes step 2 again.
        checkpoints.write(2, state(22))
        assert checkpoints.read(checkpoints.newest()[0])["seed"] == 22


def test_nothing_there(checkpoints):
    assert checkpoints.newest() == (None, {})
    assert checkpoints.steps() == []


def test_only_its_own_checkpoints_are_found(checkpoints, tmp_path):
    other = CheckpointStore(tmp_path / "other").write(1, state(1))
    written = checkpoints.write(1, state(1))
    assert checkpoints.find(written.path) == written
    for path in (other.path, tmp_path, checkpoints.folder / "step-1"):
        with pytest.raises(CheckpointError, match="is no checkpoint of"):
            checkpoints.find(path)


def test_retention_by_count(checkpoints):
    for step in range(1, 6):
        checkpoints.write(step, state(step))
        assert checkpoints.steps() == list(range(max(step - 2, 1), step + 1))


def test_retention_by_bytes(tmp_path):
    size = sum(path.stat().st_size for path in CheckpointStore(tmp_path / "one").write(1, state(1)).path.iterdir())
    checkpoints = CheckpointStore(tmp_path / "many", keep=9, max_bytes=size * 5 // 2)
    for step in range(1, 5):
        checkpoints.write(step, state(step))
    assert checkpoints.steps() == [3, 4]
    tight = CheckpointStore(tmp_path / "many", keep=9, max_bytes=1)
    tight.write(5, state(5))
    assert tight.steps() == [5]  # the newest is kept, whatever its size


def test_unfinished_ones_are_deleted_and_do_not_count(checkpoints):
    for step in (1, 2, 3):
        checkpoints.write(step, state(step))
    (checkpoints.folder / "step-000000000002" / store.MARKER).unlink()
    (checkpoints.folder / ".tmp-left").mkdir()
    checkpoints.write(4, state(4))
    # Catches a retention that deletes a good checkpoint because a bad one took its place.
    assert checkpoints.steps() == [1, 3, 4]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [f"step-{step:012d}" for step in (1, 3, 4)]


def test_later_ones_are_set_aside_not_deleted(checkpoints):
    for step in (1, 2, 3):
        checkpoints.write(step, state(step))
    moved = checkpoints.set_aside_after(1)
    assert len(moved) == 2 and checkpoints.steps() == [1]
    assert all((checkpoints.folder / name / "state.json").exists() for name in moved)


FULL = {
    "tensors": ("save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    "fsync": ("fsync", OSError(28, "No space left on device")),
    "marker": ("replace_text", OSError(28, "No space left on device")),
}


@pytest.mark.parametrize("where", FULL)
def test_a_full_disk_leaves_the_older_ones(checkpoints, monkeypatch, where):
    checkpoints.write(1, state(1))
    before = checkpoints.read(Checkpoint(checkpoints.folder / "step-000000000001", 1))
    name, error = FULL[where]

    def full(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store, name, full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*the checkpoint of step 1 is intact"):
            checkpoints.write(2, state(2))
    found, _ = checkpoints.newest()
    assert found is not None and found.step == 1
    assert torch.equal(checkpoints.read(found)["weights"]["a"], before["weights"]["a"])
    assert not list(checkpoints.folder.glob(".tmp*"))
    checkpoints.write(2, state(2))
    assert checkpoints.steps() == [1, 2]


SMALL_DISK = """
import resource, signal, sys, torch
from logra.checkpoint import CheckpointStore
from logra.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = CheckpointStore(sys.argv[1])
store.write(1, {"a": torch.ones(10)})
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
try:
    store.write(2, {"a": torch.ones(2**20)})
except CheckpointError as error:
    print(error)
print(store.newest())
"""


def test_a_disk_that_really_takes_no_more(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert "cannot be written" in result.stdout and "checkpoint of step 1 is intact" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("step=1), {})")


def test_an_object_is_never_written(checkpoints):
    with pytest.raises(ValueError, match=r"state\.callback is a"):
        checkpoints.write(1, {"callback": signal.SIGINT})
    assert checkpoints.steps() == []
