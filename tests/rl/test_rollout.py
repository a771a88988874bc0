"""Rollout engines: found by name, refused where they cannot work, measured."""

import importlib.util
from types import SimpleNamespace

import pytest
from trl.trainer import grpo_trainer

from logra.errors import ConfigError
from logra.rl import rollout
from logra.rl.config import LossConfig, RolloutConfig, TrainConfig
from logra.rl.methods import trl_arguments
from logra.rl.workers import WorkersConfig


class Generation:
    pass


class EntryPoint:
    def load(self):
        return lambda: Generation


def use(monkeypatch, *found):
    monkeypatch.setattr(rollout, "entry_points", lambda group, name: found)


def arguments(**fields):
    settings = {"use_vllm": True, "vllm_enable_sleep_mode": False, "vllm_importance_sampling_correction": True}
    return SimpleNamespace(**(settings | fields))


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


def test_workers_take_the_place_of_vllm(monkeypatch):
    asked = []
    entry = SimpleNamespace(load=lambda: lambda: lambda **given: given)
    monkeypatch.setattr(rollout, "entry_points", lambda group, name: [asked.append(name), entry][1:])
    workers = WorkersConfig(model="folder")
    with rollout.rollout_engine(arguments(vllm_importance_sampling_correction=False), workers):
        assert grpo_trainer.VLLMGeneration(temperature=1.0) == {"temperature": 1.0, "workers": workers}
    assert asked == ["ray"]


@pytest.mark.parametrize(
    ("args", "named"),
    [(None, "use_vllm=True"), (arguments(use_vllm=False), "use_vllm=True"), (arguments(), "correction=True")],
)
def test_workers_that_trl_would_not_ask_or_would_correct_are_refused(args, named):
    """Fails if a fleet is started and never used, or its samples (log-probabilities NaN) are reweighted."""
    with pytest.raises(ConfigError, match=named), rollout.rollout_engine(args, WorkersConfig(model="folder")):
        pass


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine": "sglang"}, "workers.engine"),
        ({"num_workers": 0}, "workers.num_workers=0"),
        ({"num_gpus": -1}, "workers.num_gpus"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_settings_of_workers_are_checked(settings, named):
    with pytest.raises(ConfigError, match=named):
        WorkersConfig(model="folder", **settings)


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


def config(**rollout_fields):
    return TrainConfig(output_dir="out", rollout=RolloutConfig(**rollout_fields))


def test_engines_in_trls_terms(monkeypatch):
    use(monkeypatch, EntryPoint())
    assert trl_arguments(config()).use_vllm is False
    colocated = trl_arguments(config(engine="vllm"))
    assert (colocated.use_vllm, colocated.vllm_mode) == (True, "colocate")
    server = trl_arguments(config(engine="vllm_server", server_url="http://host:1"))
    assert (server.use_vllm, server.vllm_mode, server.vllm_server_base_url) == (True, "server", "http://host:1")
    assert trl_arguments(config(engine="vllm_server")).vllm_server_base_url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_a_missing_vllm_is_found_early_and_says_what_to_do(monkeypatch, engine):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"pip install 'logra\[vllm\]'.*rollout.engine=transformers.*use_vllm=False"):
        trl_arguments(config(engine=engine))


def test_a_fleet_in_trls_terms(monkeypatch):
    use(monkeypatch, EntryPoint())
    workers = trl_arguments(config(engine="ray", num_workers=2))
    assert (workers.use_vllm, workers.vllm_importance_sampling_correction) == (True, False)
    workers = trl_arguments(config(engine="ray_vllm"))
    assert (workers.use_vllm, workers.vllm_importance_sampling_correction) == (True, True)
    use(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'logra\[ray\]'"):
        trl_arguments(config(engine="ray"))
    for engine in ("vllm", "vllm_server"):  # found here, before a model is loaded
        with pytest.raises(ConfigError, match=r"pip install 'logra\[vllm\]'"):
            trl_arguments(config(engine=engine))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rollout": {"engine": "sglang"}}, "rollout.engine"),
        ({"rollout": {"server_url": "http://x"}}, "rollout.server_url"),
        ({"rollout": {"engine": "vllm", "server_url": "http://x"}}, "rollout.server_url"),
        ({"rollout": {"engine": "vllm"}, "method": "adamw"}, "rollout.engine"),
        ({"rollout": {"engine": "vllm_server"}, "method": "lora"}, "rollout.engine"),
        ({"rollout": {"engine": "ray"}, "method": "lora"}, "rollout.engine"),
        ({"rollout": {"num_workers": 2}}, "rollout.num_workers=2"),
        ({"rollout": {"engine": "vllm", "worker_gpus": 1}}, "rollout.worker_gpus=1"),
        ({"rollout": {"engine": "ray"}, "loss": LossConfig(importance="off")}, "loss.*rollout.engine=ray"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        TrainConfig(output_dir="out", **(fields | {"rollout": RolloutConfig(**fields["rollout"])}))


@pytest.mark.parametrize(("name", "value"), [("num_workers", 0), ("worker_threads", 0), ("worker_gpus", -1)])
def test_settings_of_workers_are_refused_by_the_name_of_the_flag(name, value):
    """Fails if they are checked by `WorkersConfig` alone, which is built when the model has been loaded."""
    with pytest.raises(ConfigError, match=f"rollout.{name}={value}"):
        RolloutConfig(engine="ray", **{name: value})
