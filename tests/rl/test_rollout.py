"""Rollout engines: found by name, refused where they cannot work, measured."""

from types import SimpleNamespace

import pytest
from trl.trainer import grpo_trainer

from logra.errors import ConfigError
from logra.rl import rollout
from logra.rl.config import RolloutConfig, TrainConfig
from logra.rl.methods import trl_arguments


class Generation:
    pass


class EntryPoint:
    def load(self):
        return lambda: Generation


def use(monkeypatch, *found):
    monkeypatch.setattr(rollout, "entry_points", lambda group, name: found)


def arguments(**fields):
    return SimpleNamespace(**({"use_vllm": True, "vllm_enable_sleep_mode": False} | fields))


def test_trl_builds_the_engine_that_the_entry_point_names(monkeypatch):
    use(monkeypatch, EntryPoint())
    original = grpo_trainer.VLLMGeneration
    with rollout.rollout_engine(arguments()):
        assert grpo_trainer.VLLMGeneration is Generation
    assert grpo_trainer.VLLMGeneration is original
    # Catches an error in TRL's constructor that leaves the exchange in place.
    with pytest.raises(RuntimeError), rollout.rollout_engine(arguments()):
        raise RuntimeError
    assert grpo_trainer.VLLMGeneration is original


@pytest.mark.parametrize("args", [None, arguments(use_vllm=False)])
def test_without_an_engine_nothing_is_exchanged(monkeypatch, args):
    use(monkeypatch)
    original = grpo_trainer.VLLMGeneration
    with rollout.rollout_engine(args):
        assert grpo_trainer.VLLMGeneration is original


def test_what_cannot_work_is_refused_before_the_model_loads(monkeypatch):
    use(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'logra\[vllm\]'"), rollout.rollout_engine(arguments()):
        pass
    with (
        pytest.raises(ConfigError, match="vllm_enable_sleep_mode=True"),
        rollout.rollout_engine(arguments(vllm_enable_sleep_mode=True)),
    ):
        pass


def test_the_metrics_of_a_synchronisation():
    delivery = SimpleNamespace(version=3, num_bytes=100, seconds=0.5)
    generation = SimpleNamespace(last_delivery=delivery, num_anchors=1)
    assert rollout.delivery_metrics(generation) == {
        "sync/delivered_bytes": 100.0,
        "sync/seconds": 0.5,
        "sync/anchors": 1.0,
    }
    assert rollout.delivery_metrics(SimpleNamespace(last_delivery=None, num_anchors=0)) == {}


def config(**rollout_fields):
    return TrainConfig(output_dir="out", rollout=RolloutConfig(**rollout_fields))


def test_engines_in_trls_terms():
    assert trl_arguments(config()).use_vllm is False
    colocated = trl_arguments(config(engine="vllm"))
    assert (colocated.use_vllm, colocated.vllm_mode) == (True, "colocate")
    server = trl_arguments(config(engine="vllm_server", server_url="http://host:1"))
    assert (server.use_vllm, server.vllm_mode, server.vllm_server_base_url) == (True, "server", "http://host:1")
    assert trl_arguments(config(engine="vllm_server")).vllm_server_base_url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rollout": {"engine": "sglang"}}, "rollout.engine"),
        ({"rollout": {"server_url": "http://x"}}, "rollout.server_url"),
        ({"rollout": {"engine": "vllm", "server_url": "http://x"}}, "rollout.server_url"),
        ({"rollout": {"engine": "vllm"}, "method": "adamw"}, "rollout.engine"),
        ({"rollout": {"engine": "vllm_server"}, "method": "lora"}, "rollout.engine"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        TrainConfig(output_dir="out", **(fields | {"rollout": RolloutConfig(**fields["rollout"])}))
