"""Bad input of a plan is named before anything is traced."""

import importlib
import json

import pytest

import logra
from logra.errors import ConfigError
from logra.planner.models import PRESETS, load_config
from logra.planner.options import parse_memory


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GB", 80 * 10**9), ("24 gib", 24 * 2**30), ("0.5TB", 5 * 10**11), ("512MiB", 2**29)]
)
def test_memory_sizes(text, num_bytes):
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["80", "GB", "-3GB", "0GB", "80XB", 80, "", "9" * 400 + "GB"])
def test_a_memory_size_without_a_unit_is_refused(text):
    with pytest.raises(ConfigError, match=r"gpu_memory=.*with a unit"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": "qwen9-1t"}, "model='qwen9-1t'.*qwen2.5-7b"),
        ({"methods": ["logra", "sgd"]}, "method='sgd'"),
        ({"methods": []}, "some of logra"),
        ({"num_gpus": 0}, "num_gpus=0"),
        ({"num_gpus": 10**6}, "more than the 256 rows"),
        ({"seq_len": 2}, "seq_len=2"),
        ({"prompt_len": 5000}, "prompt_len=5000"),
        ({"micro_batch": 1.5}, "micro_batch=1.5"),
        ({"rank": 0}, "rank=0"),
        ({"num_processes": 0}, "num_processes=0"),
        ({"gpu_memory": "80"}, "gpu_memory='80'"),
        ({"sequence": 5}, "sequence"),
    ],
)
def test_what_cannot_be_planned_is_named(settings, named):
    with pytest.raises(ConfigError, match=named):
        logra.memory.plan(**({"model": "qwen2.5-1.5b"} | settings))


def test_a_configuration_that_is_none(tmp_path):
    for content, named in (
        ("not json", "not a JSON"),
        ("{}", "no model_type"),
        ('{"model_type": "gpt9"}', "does not take"),
    ):
        (tmp_path / "config.json").write_text(content)
        for path in (tmp_path, tmp_path / "config.json"):
            with pytest.raises(ConfigError, match=named):
                load_config(str(path))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "gpt2"}, "type gpt2 without intermediate_size"),
        ({"model_type": "mamba"}, "type mamba without num_attention_heads"),
        ({"model_type": "clip"}, "type clip without hidden_size"),
        ({"hidden_size": "64"}, "does not take"),
        ({"num_attention_heads": 0}, "does not take|num_attention_heads=0"),
        ({"num_attention_heads": None}, "does not take|num_attention_heads"),
        ({"num_key_value_heads": 0}, "does not take|num_key_value_heads=0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"text_config": {"model_type": []}}, "does not take"),
        ({"text_config": "llama"}, "no model_type"),
    ],
    ids=str,
)
def test_configurations_that_no_plan_reads(tmp_path, monkeypatch, settings, named):
    """Fails if a size that is missing or none is met after the trace, which takes long."""
    monkeypatch.setattr(importlib.import_module("logra.planner.plan"), "trace", lambda *_: pytest.fail("traced"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | settings))
    with pytest.raises(ConfigError, match=rf"(?s)model=.*({named})"):
        logra.memory.plan(str(tmp_path))


def test_a_text_config_of_null_is_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "text_config": None}))
    assert load_config(str(tmp_path)).hidden_size == 64


def test_a_model_whose_forward_cannot_be_traced(tmp_path):
    """An encoder-decoder has no causal language model: an error that names the model, no guess."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "t5", "d_model": 8, "intermediate_size": 8, "num_layers": 1})
    )
    several = {"methods": ["adamw", "logra"], "num_processes": 2}
    for settings, named in (
        ({"methods": "adamw"}, "^model: "),
        (several, "^none of .*adamw: model: .*; logra: model: "),
    ):
        with pytest.raises(ConfigError, match=named):
            logra.memory.plan(str(tmp_path), **settings)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_size_in_their_name(name):
    """Fails for a typo in a preset: linear weights and embeddings make up all but a fraction of a model."""
    from logra.planner.options import PlanOptions
    from logra.planner.plan import assumptions

    num_parameters = assumptions(load_config(name), PlanOptions())["rollout_weights_bytes"] / 2
    billions = float(name.rpartition("-")[2].removesuffix("b"))
    assert billions * 0.98 < num_parameters / 1e9 < billions * 1.1
