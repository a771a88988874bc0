"""The configuration tree: presets, checks, and its plain form."""

import dataclasses

import pytest

import logra
from logra.errors import ConfigError
from logra.rl.config import (
    AdamWConfig,
    LoraConfig,
    LossConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    changed_fields,
    preset,
    to_dict,
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RolloutConfig(num_samples=1), "rollout.num_samples=1"),
        (lambda: RolloutConfig(num_prompts=0), "rollout.num_prompts=0"),
        (lambda: RolloutConfig(temperature=0.0), "rollout.temperature=0.0"),
        (lambda: RolloutConfig(max_new_tokens=0), "rollout.max_new_tokens=0"),
        (lambda: LossConfig(beta=-1.0), "loss.beta=-1.0"),
        (lambda: LossConfig(epsilon=0.0), "loss.epsilon=0.0"),
        (lambda: LossConfig(micro_batch_size=0), "loss.micro_batch_size=0"),
        (lambda: RunConfig(num_steps=0), "run.num_steps=0"),
        (lambda: RunConfig(num_threads=0), "run.num_threads=0"),
        (lambda: LoraConfig(rank=0), "lora.rank=0"),
        (lambda: TrainConfig(output_dir=""), "output_dir=''"),
        (lambda: TrainConfig(output_dir="x", method="sgd"), "method='sgd'"),
        (lambda: TrainConfig(output_dir="x", num_heldout=-1), "num_heldout=-1"),
        (lambda: TrainConfig(output_dir="x", loss=LossConfig(micro_batch_size=7)), "loss.micro_batch_size=7: must divide"),
        (lambda: TrainConfig(output_dir="x", logra=logra.Config(trust=logra.TrustRegion())), "group trust"),
    ],
)  # fmt: skip
def test_values_that_are_not_allowed(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "adamw", "logra": logra.Config(lr=1e-4, rank=8)}, "logra (rank=8) was set.*method=adamw"),
        ({"method": "adamw", "lora": LoraConfig(rank=8)}, "lora (rank=8) was set.*method=adamw"),
        ({"method": "lora", "adamw": AdamWConfig(lr=1.0)}, "adamw (lr=1.0) was set.*method=lora"),
        ({"use_trust": False, "trust": logra.TrustRegion()}, "trust (.*) was set.*use_trust=false"),
    ],
)
def test_settings_of_a_method_that_does_not_run(settings, message):
    # Catches a comparison whose settings silently had no effect.
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=pattern):
        TrainConfig(output_dir="x", **settings)


@pytest.mark.parametrize("method", ["logra", "paper", "adamw", "lora"])
def test_every_preset_is_a_valid_run(method):
    config = TrainConfig(output_dir="x", method=method, **preset(method))
    assert config.rollout.num_completions == 64


def test_paper_preset_is_the_published_method():
    groups = preset("paper")
    assert groups["logra"] == logra.Config.paper()
    assert (groups["trust"].kl_budget, groups["trust"].kl_budget_final) == (2e-4, 2e-5)
    assert groups["trust"].schedule_steps == 300


def test_optimizer_config_carries_the_trust_region():
    config = TrainConfig(output_dir="x")
    assert config.optimizer_config.trust == config.trust
    assert config.optimizer_config.rank == config.logra.rank
    assert TrainConfig(output_dir="x", use_trust=False).optimizer_config.trust is None


def test_lists_equal_tuples():
    # YAML and flags give lists where a default is a tuple.
    listed = dataclasses.replace(logra.Config(), target_modules=list(logra.Config().target_modules))
    assert changed_fields(listed, logra.Config()) == []
    assert changed_fields(logra.Config(rank=8), logra.Config()) == ["rank=8"]


def test_the_plain_form_holds_no_objects():
    def check(value):
        assert value is None or type(value) in (dict, list, str, int, float, bool)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(item)

    plain = to_dict(TrainConfig(output_dir="x", run=RunConfig(report_to=("trackio",))))
    check(plain)
    assert plain["run"]["report_to"] == ["trackio"]
    assert "trust" not in plain["logra"]
    assert plain["trust"]["kl_budget"] == 0.03
