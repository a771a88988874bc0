"""The order and the arithmetic of the comparison with vLLM, without an engine; `make test-vllm` has engines."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from logra.bench import sync_vllm
from logra.bench.harness.results import Record, Results
from logra.bench.transfer.engines import engine
from logra.errors import ConfigError
from logra.update import PolicyUpdate


def test_every_reload_is_of_the_checkpoint_just_written_and_every_update_follows_full_weights(tmp_path, monkeypatch):
    # Catches an update that is pushed to an engine without its base, and times that are filed under another name.
    calls = []
    clock = iter(range(0, 10**6))
    monkeypatch.setattr(sync_vllm, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    weights = {"w": torch.arange(4.0)}

    class Client:
        manifest = last_delivery = None

        def load(self, given, version):
            assert self.manifest.run_id == sync_vllm.RUN_ID and version == 0
            calls.append("load")
            self.last_delivery = SimpleNamespace(num_bytes=16)
            for _ in range(4):
                next(clock)

        def push(self, update):
            calls.append((update.base_version, update.version))
            self.last_delivery = SimpleNamespace(num_bytes=3)

    def reload(folder):
        calls.append("reload")
        assert torch.equal(load_file(folder / "model.safetensors")["w"], weights["w"])

    def reload_ordinary(folder):
        calls.append("ordinary")
        assert torch.equal(load_file(folder / "model.safetensors")["w"], weights["w"])
        (folder / "model.safetensors").unlink()
        for _ in range(2):
            next(clock)

    built = SimpleNamespace(client=Client(), reload=reload)
    update = PolicyUpdate(0, 1, 0, 0, {})
    found = sync_vllm.measure(built, reload_ordinary, update, weights, tmp_path, num_repeats=3)
    assert calls == ["load", (0, 1), (1, 2), "reload", "ordinary"] * 3
    expected = {
        "load_s": 5.0,
        "first_push_s": 1.0,
        "push_s": 1.0,
        "write_s": 1.0,
        "reload_s": 1.0,
        "reload_ordinary_s": 3.0,
    }
    expected |= {"load_bytes": 16, "push_bytes": 3}
    assert found == expected


def test_a_ratio_says_how_many_times_the_update_is_faster():
    result = {"load_s": 3.0, "push_s": 0.2, "write_s": 0.2, "reload_s": 0.3, "reload_ordinary_s": 0.8}
    result |= {"load_bytes": 16, "push_bytes": 3}
    record = Record(
        cell={"way": "server"},
        result=result,
        machine={},
        commit=None,
        dirty=None,
        date=None,
        command="",
        jobs=1,
        wall_s=1.0,
    )
    text = sync_vllm.table(Results("sync_vllm", {}, [record]))
    assert "| 0.20 s | 3.00 s (15.0x) | 1.00 s (5.0x) | 0.80 s (4.0x) | 0.30 s (1.5x) |" in text


def test_ways_that_are_not_known():
    with pytest.raises(ConfigError, match="in_process, other_process, server"):
        sync_vllm.Options(ways=("carrier pigeon",))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_where_there_is_one(tmp_path):
    with pytest.raises(ConfigError, match=r"this benchmark with \.venv-vllm/bin/logra"), engine("in_process", tmp_path):
        pass
