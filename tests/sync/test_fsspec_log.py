"""The log in storages of fsspec: the same files, the same refusals, whatever the storage does."""

import sys
from dataclasses import replace

import pytest
import torch

from logra.errors import PacketError, SyncError
from logra.sync import DirectoryLog, FsspecLog

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    yield f"{request.param}://{tmp_path}/updates"
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


@pytest.fixture
def stored(url, run):
    log = FsspecLog(url, run.manifest)
    for update in run.updates:
        assert log.append(update) == update.num_bytes
    return log


def changeable(run, version):
    return {name: value for name, value in run.weights[version].items() if name != "embed.weight"}


def test_replicas_follow_it(tools, run, url):
    # Catches a reader that remembers a listing, and packets that change on the way.
    writer = FsspecLog(url)
    assert writer.manifest is None
    writer.start(run.manifest)
    reader, follower = FsspecLog(url), tools.build("fp32-shards-2", run)
    for update in run.updates:
        writer.append(update)
        assert follower.catch_up(reader) == 1
    tools.assert_same_bits(follower.weights(), run.weights[-1])
    assert FsspecLog(url).manifest == run.manifest


def test_it_holds_the_files_of_a_directory_log(run, tmp_path, log):
    # Catches names or contents that differ: a folder that is copied must stay a log.
    stored = FsspecLog(f"file://{tmp_path}/copied", run.manifest)
    for update in run.updates:
        stored.append(update)
    for place in (stored, log):
        place.write_anchor(4, changeable(run, 4))
    files = {path.relative_to(log.path): path.read_bytes() for path in log.path.rglob("*") if path.is_file()}
    root = tmp_path / "copied"
    assert {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()} == files
    assert DirectoryLog(root).latest() == 6


def test_what_does_not_continue_it_is_refused(run, stored, url):
    first, last = run.updates[0], run.updates[-1]
    assert stored.append(last) == last.num_bytes  # again
    with pytest.raises(SyncError, match="gap"):
        stored.append(replace(last, base_version=7, version=8))
    with pytest.raises(SyncError, match="holds another update to version 6"):
        stored.append(replace(last, weights_digest=None))
    with pytest.raises(PacketError, match="run_id"):
        stored.append(replace(first, run_id="other", base_version=6, version=7))
    with pytest.raises(SyncError, match="choose another folder"):
        FsspecLog(url, replace(run.manifest, run_id="other"))
    with pytest.raises(SyncError, match="nothing to continue version 7"):
        next(stored.read_since(7))
    assert stored.latest() == 6


def test_damage_is_found(run, stored, url):
    path = f"{stored._path}/000000000003.update"
    data = bytearray(stored._storage.cat_file(path))
    data[100] ^= 4
    stored._storage.pipe_file(path, bytes(data))
    with pytest.raises(PacketError, match="seal"):
        list(stored.read_since(2))
    stored._storage.pipe_file(path, run.updates[3].to_bytes())
    with pytest.raises(PacketError, match="holds the update to version 4"):
        list(stored.read_since(2))
    stored._storage.rm_file(path)
    with pytest.raises(SyncError, match="gap"):
        list(stored.read_since(2))
    with pytest.raises(SyncError, match="gaps"):
        FsspecLog(url)


def test_anchors_are_kept_and_checked(tools, run, stored):
    assert stored.latest_anchor(9) is None
    for version in (2, 4, 4):
        stored.write_anchor(version, changeable(run, version))
    assert [stored.latest_anchor(limit) for limit in (1, 3, 9)] == [None, 2, 4]
    follower = tools.build("split32-module", run)
    (replica,) = follower.replicas
    replica.invalidate("restarted")
    assert replica.catch_up(stored) == 2
    tools.assert_same_bits(follower.weights(), run.weights[-1])
    with pytest.raises(SyncError, match="never replaced"):
        stored.write_anchor(4, changeable(run, 5))
    with pytest.raises(SyncError, match="no version 7"):
        stored.write_anchor(7, changeable(run, 5))
    with pytest.raises(SyncError, match="no anchor of version 3"):
        stored.read_anchor(3)
    path = f"{stored._path}/anchors/000000000004.safetensors"
    data = bytearray(stored._storage.cat_file(path))
    data[-3] ^= 16
    stored._storage.pipe_file(path, bytes(data))
    with pytest.raises(SyncError, match="damaged"):
        stored.read_anchor(4)
    stored._storage.pipe_file(path, bytes(data[:200]))
    with pytest.raises(SyncError, match="cannot be read"):
        stored.read_anchor(4)


def test_a_storage_that_fails_leaves_the_log_as_it_was(run, url, monkeypatch):
    # Catches an error of some library that passes through, and half a file that counts as a version.
    log = FsspecLog(url, run.manifest)
    log.append(run.updates[0])
    write = type(log._storage).pipe_file

    def fails(self, path, value, **settings):
        if self.protocol != "memory":  # object stores write whole or not at all
            write(self, path, value[: len(value) // 2])
        raise RuntimeError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(log._storage), "pipe_file", fails)
        with pytest.raises(SyncError, match="network is down"):
            log.append(run.updates[1])
    assert FsspecLog(url).latest() == log.latest() == 1
    log.append(run.updates[1])
    assert log.read(2).digest == run.updates[1].digest


def test_places_that_are_no_log_are_refused(url, run, tmp_path, monkeypatch):
    fsspec.filesystem(url.partition(":")[0]).makedirs(url.partition("//")[2], exist_ok=True)
    fsspec.filesystem(url.partition(":")[0]).pipe_file(url.partition("//")[2] + "/notes.txt", b"mine")
    with pytest.raises(SyncError, match=r"notes\.txt"):
        FsspecLog(url, run.manifest)
    with pytest.raises(SyncError, match="holds no update log"):
        FsspecLog(f"memory://{tmp_path}/nothing").latest()
    with pytest.raises(SyncError, match="cannot be opened"):
        FsspecLog("no-such-protocol://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SyncError, match=r"logra\[fsspec\]"):
        FsspecLog(url)


def test_the_first_update_begins_it(run, url):
    log = FsspecLog(url)
    with pytest.raises(SyncError, match="no run id"):
        log.append(replace(run.updates[0], run_id=""))
    log.append(run.updates[0])
    assert log.manifest is not None and log.manifest.run_id == run.manifest.run_id
    assert torch.equal(
        log.read(1).weights["layer.q_proj.weight"].exponent_in,
        run.updates[0].weights["layer.q_proj.weight"].exponent_in,
    )
