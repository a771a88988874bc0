"""The configuration tree: presets, checks, and its plain form."""

import dataclasses
import sys

import pytest

import logra
from logra.errors import ConfigError
from logra.rl.baselines import AdamWConfig, ApolloConfig, GaLoreConfig, LoraConfig
from logra.rl.config import (
    METHODS,
    LossConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    changed_fields,
    preset,
    to_dict,
)
from logra.rl.guards.config import GuardsConfig, ReferenceReset, Rule, Sentinels


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
        (lambda: RunConfig(seed=2**32), "run.seed=4294967296"),
        (lambda: RunConfig(lr_schedule="cosin"), "run.lr_schedule='cosin': one of constant, linear, cosine"),
        (lambda: RolloutConfig(num_prompts=2.5), "rollout.num_prompts=2.5: an integer"),
        (lambda: RolloutConfig(temperature=float("inf")), "rollout.temperature=inf"),
        (lambda: LossConfig(loss_type="dapoo"), "loss.loss_type='dapoo': one of dapo, grpo"),
        (lambda: LossConfig(epsilon=float("nan")), "loss.epsilon=nan"),
        (lambda: AdamWConfig(lr=0.0), "adamw.lr=0.0"),
        (lambda: AdamWConfig(lr=float("inf")), "adamw.lr=inf"),
        (lambda: AdamWConfig(weight_decay=-1.0), "adamw.weight_decay=-1.0"),
        (lambda: AdamWConfig(max_grad_norm=-1.0), "adamw.max_grad_norm=-1.0"),
        (lambda: LoraConfig(rank=0), "lora.rank=0"),
        (lambda: LoraConfig(alpha=0.0), "lora.alpha=0.0"),
        (lambda: LoraConfig(lr=-1.0), "lora.lr=-1.0"),
        (lambda: LoraConfig(max_grad_norm=float("nan")), "lora.max_grad_norm=nan"),
        (lambda: GaLoreConfig(rank=0), "galore.rank=0"),
        (lambda: GaLoreConfig(update_proj_gap=0), "galore.update_proj_gap=0"),
        (lambda: GaLoreConfig(scale=0.0), "galore.scale=0.0"),
        (lambda: ApolloConfig(lr=0.0), "apollo.lr=0.0"),
        (lambda: ApolloConfig(max_grad_norm=-1.0), "apollo.max_grad_norm=-1.0"),
        (
            lambda: TrainConfig(output_dir="x", rollout=RolloutConfig(engine="vllm"), loss=LossConfig(loss_type="vespo")),
            "loss.loss_type='vespo' with rollout.engine='vllm'",
        ),
        (lambda: TrainConfig(output_dir=""), "output_dir=''"),
        (lambda: TrainConfig(output_dir="x", method="sgd"), "method='sgd'"),
        (lambda: TrainConfig(output_dir="x", num_heldout=-1), "num_heldout=-1"),
        (lambda: TrainConfig(output_dir="x", loss=LossConfig(micro_batch_size=7)), "loss.micro_batch_size=7: must divide"),
        (lambda: TrainConfig(output_dir="x", logra=logra.Config(trust=logra.TrustRegion())), "group trust"),
        (
            lambda: TrainConfig(output_dir="x", logra=logra.Config(weight_storage="split32", non_target="adamw")),
            "logra.non_target='adamw' with logra.weight_storage='split32'",
        ),
        (
            lambda: TrainConfig(output_dir="x", logra=logra.Config(weight_storage="split24", non_target="adamw")),
            "logra.non_target='adamw' with logra.weight_storage='split24'",
        ),
    ],
)  # fmt: skip
def test_values_that_are_not_allowed(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "adamw", "logra": logra.Config(lr=1e-4, rank=8, coherence_scaling=True)},
            "logra (rank=8) was set.*method=adamw",
        ),
        ({"method": "adamw", "lora": LoraConfig(rank=8)}, "lora (rank=8) was set.*method=adamw"),
        ({"method": "lora", "adamw": AdamWConfig(lr=1.0)}, "adamw (lr=1.0) was set.*method=lora"),
        ({"method": "galore", "apollo": ApolloConfig(rank=8)}, "apollo (rank=8) was set.*method=galore"),
        ({"use_trust": False, "trust": logra.TrustRegion()}, "trust (.*) was set.*use_trust=False"),
    ],
)
def test_settings_of_a_method_that_does_not_run(settings, message):
    # Catches a comparison whose settings silently had no effect.
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=pattern):
        TrainConfig(output_dir="x", **settings)


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_are_not_given_are_those_of_the_method(method):
    # Catches method="paper" in Python that runs with the settings of another method.
    config = TrainConfig(output_dir="x", method=method)
    assert {group: getattr(config, group) for group in preset(method)} == preset(method)
    assert config.rollout.num_completions == 64


def test_a_step_that_takes_all_of_its_budget_has_a_smaller_one():
    """The budget of logra is shared out by coherence, which the baselines do not have."""
    assert TrainConfig(output_dir="x").trust.budget_at(0) == 0.1
    for method in ("adamw", "lora", "galore", "apollo"):
        trust = TrainConfig(output_dir="x", method=method, use_trust=True).trust
        assert [trust.budget_at(step) for step in (0, 15)] == pytest.approx([0.03, 0.01])


def test_a_group_that_is_given_is_kept():
    given = preset("logra")
    config = TrainConfig(output_dir="x", method="paper", logra=given["logra"])
    assert config.logra == given["logra"]
    assert config.trust == preset("paper")["trust"]


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
    assert plain["trust"]["kl_budget"] == 0.1


ROLLS_BACK = GuardsConfig(sentinels=Sentinels(entropy_floor=Rule(threshold=0.1, action="rollback")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "adamw", "guards": ROLLS_BACK}, "action rollback with method=adamw"),
        ({"guards": GuardsConfig(reference=ReferenceReset(every_steps=5))}, "guards.reference with loss.beta=0.0"),
        ({"guards": GuardsConfig(validate_every=5), "num_heldout": 0}, "guards.validate_every=5"),
        ({"loss": LossConfig(importance="token_truncate")}, "importance='token_truncate'.*no effect"),
        ({"loss": LossConfig(off_policy_kl=0.5)}, "off_policy_kl=0.5.*no effect"),
    ],
)
def test_guards_that_could_never_act_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(output_dir="x", **settings)


def test_what_trl_has_goes_to_trl(monkeypatch):
    from logra.rl import methods

    trl_arguments = methods.trl_arguments
    monkeypatch.setattr(methods, "engine_class", lambda name: None)  # as if vLLM were installed
    loss = LossConfig(
        mask_truncated=True, top_entropy=0.2, entropy_coef=0.01, importance="token_truncate", importance_max=2.0,
        importance_min=0.5, off_policy_kl=0.3,
    )  # fmt: skip
    given = trl_arguments(TrainConfig(output_dir="x", loss=loss, rollout=RolloutConfig(engine="vllm")))
    assert (given.epsilon, given.epsilon_high) == (0.2, 0.28)
    assert given.mask_truncated_completions and given.top_entropy_quantile == 0.2 and given.entropy_coef == 0.01
    assert given.vllm_importance_sampling_correction and given.vllm_importance_sampling_mode == "token_truncate"
    assert (given.vllm_importance_sampling_clip_min, given.vllm_importance_sampling_clip_max) == (0.5, 2.0)
    assert given.off_policy_mask_threshold == 0.3
    off = trl_arguments(
        TrainConfig(output_dir="x", loss=LossConfig(importance="off"), rollout=RolloutConfig(engine="vllm"))
    )
    assert not off.vllm_importance_sampling_correction


@pytest.mark.parametrize("method", ["galore", "apollo"])
def test_a_baseline_without_its_package_says_what_to_install(method, monkeypatch):
    from logra.rl.methods import trl_arguments

    monkeypatch.setitem(sys.modules, f"{method}_torch", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"^method={method}: .*{method}_torch.*pip install 'logra\[bench\]'"):
        trl_arguments(TrainConfig(output_dir="x", method=method))


@pytest.mark.parametrize("field", ["model", "task", "output_dir"])
@pytest.mark.parametrize("value", [None, ""])
def test_an_unquoted_tilde_of_yaml_is_nothing(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value!r}"):
        TrainConfig(**{"output_dir": "x", field: value})


def test_paths_of_a_file_may_name_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = TrainConfig(
        output_dir="~/runs/a", model="~/model", task="~/task.py", dataset="~/rows.jsonl", resume="auto"
    )
    assert (config.output_dir, config.model) == ("/home/someone/runs/a", "/home/someone/model")
    assert (config.task, config.dataset) == ("/home/someone/task.py", "/home/someone/rows.jsonl")
    assert config.resume == "auto"
