"""`GRPOTrainer`: the sketch optimizer inside TRL's loop."""

import json
import math
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

import logra
from logra.diagnostics import CollateralProbe, DirectionProbe
from logra.errors import ConfigError
from logra.rl import GRPOTrainer

TRUST = logra.TrustRegion(kl_budget=1e-3, alpha_max=1e6, min_tokens=16)


@pytest.fixture
def make_trainer(model, tokenizer, dataset, make_args, num_letters):
    def make(reward=None, *, config=None, policy=None, diagnostics=(), **overrides):
        return GRPOTrainer(
            model=policy or model,
            reward_funcs=reward or num_letters,
            args=make_args(**overrides),
            train_dataset=dataset,
            processing_class=tokenizer,
            logra=config or logra.Config(rank=4, trust=TRUST),
            diagnostics=diagnostics,
        )

    return make


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_weights_move_by_exactly_the_updates(make_trainer, model):
    updates = []

    class Keep(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **_):
            updates.append(trainer.sketch_optimizer.last_update)

    trainer = make_trainer()
    trainer.add_callback(Keep())
    before = weights(model)
    trainer.train()
    assert [update.version for update in updates] == [1, 2]
    for name, start in before.items():
        expected = start.clone()
        for update in updates:
            if name in update.weights:
                expected = expected - update.weights[name].dense()
        # Catches a second optimizer touching the weights, and targets that never moved.
        assert torch.equal(model.get_parameter(name), expected)
        assert ("proj" in name) == (not torch.equal(start, expected))


def test_the_metrics_of_a_step(make_trainer):
    trainer = make_trainer()
    trainer.train()
    logs = logs_of(trainer)
    assert [entry["sync/version"] for entry in logs] == [1, 2]
    for entry in logs:
        assert entry["grad_norm"] == entry["optim/grad_norm"] > 0
        assert entry["trust/budget"] == pytest.approx(1e-3, rel=1e-3)
        assert entry["trust/planned_kl"] == pytest.approx(entry["trust/alpha"] ** 2 * entry["trust/predicted_kl"])
        assert entry["trust/planned_kl"] == pytest.approx(entry["trust/budget"], rel=1e-5)
        ratio = entry["trust/realised_kl"] / entry["trust/planned_kl"]
        assert entry["trust/realised_over_planned"] == pytest.approx(ratio)
        # The KL is nearly quadratic at this length; rounding to 4 bits adds a little.
        assert entry["trust/realised_kl"] == pytest.approx(1e-3, rel=0.5)
        assert entry["optim/update_ratio"] > 0
        assert entry["optim/skipped"] == 0
        assert entry["sync/bytes"] > 0
        assert 0 < entry["time/probe_s"] < entry["time/update_s"]


def test_equal_rewards_are_a_logged_step_without_change(make_trainer, model):
    def constant(completions, **_):
        return [0.35] * len(completions)

    before = weights(model)
    trainer = make_trainer(constant)
    trainer.train()
    logs = logs_of(trainer)
    assert [entry["optim/skipped"] for entry in logs] == [1, 2]
    assert [entry["sync/version"] for entry in logs] == [0, 0]
    assert [entry["sync/bytes"] for entry in logs] == [0, 0]
    assert all("trust/predicted_kl" not in entry for entry in logs)  # nothing was priced
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def test_the_probe_covers_the_whole_window(make_trainer):
    seen = []
    trainer = make_trainer(config=logra.Config(rank=4, trust=TRUST), temperature=0.9, max_steps=1)
    optimizer = trainer.create_optimizer()
    original = optimizer.set_probe
    optimizer.set_probe = lambda **kwargs: (seen.append(kwargs), original(**kwargs))
    trainer.train()
    (probe,) = seen
    # 2 micro-batches of 4, not just the last one.
    assert probe["input_ids"].shape[0] == 8
    assert probe["temperature"] == 0.9
    batches = [batch.whole() for batch in trainer._buffered_inputs]
    assert probe["loss_mask"].sum() == sum(batch["completion_mask"].sum() for batch in batches)
    assert probe["attention_mask"].sum() == sum(
        batch["completion_mask"].sum() + batch["prompt_mask"].sum() for batch in batches
    )


def test_several_optimizer_steps_per_generation_and_several_generations_per_step(make_trainer):
    # steps_per_generation above and below gradient_accumulation_steps: the window is what was accumulated, either way.
    for steps_per_generation in (4, 1):
        trainer = make_trainer(steps_per_generation=steps_per_generation, max_steps=3)
        seen = []
        optimizer = trainer.create_optimizer()
        original = optimizer.set_probe
        optimizer.set_probe = lambda original=original, seen=seen, **kwargs: (seen.append(kwargs), original(**kwargs))
        trainer.train()
        assert [probe["input_ids"].shape[0] for probe in seen] == [8, 8, 8]
        trainer.sketch_optimizer.detach()


def test_without_trust_region(make_trainer):
    trainer = make_trainer(config=logra.Config(rank=4))
    trainer.train()
    assert all("trust/predicted_kl" not in entry for entry in logs_of(trainer))
    assert all("time/probe_s" not in entry for entry in logs_of(trainer))
    assert trainer.sketch_optimizer.version == 2


def test_learning_rate_is_the_configs_and_follows_the_schedule(make_trainer):
    rates = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **_):
            rates.append(trainer.sketch_optimizer.param_groups[0]["lr"])

    trainer = make_trainer(config=logra.Config(rank=4, lr=2e-4), lr_scheduler_type="linear", max_steps=4)
    trainer.add_callback(Keep())
    trainer.train()
    assert rates == pytest.approx([2e-4, 1.5e-4, 1e-4, 5e-5])


def test_setting_trls_own_learning_rate_warns(make_trainer):
    with pytest.warns(UserWarning, match=r"learning_rate=0\.001 \(use Config\.lr\)"):
        make_trainer(learning_rate=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        make_trainer(policy=None)


@pytest.mark.parametrize(
    ("trl_norm", "own_norm", "expected"), [(0.5, None, 0.5), (0.5, 0.1, 0.1), (0.0, None, None), (0.0, 0.1, 0.1)]
)
def test_gradient_clipping(make_trainer, trl_norm, own_norm, expected):
    trainer = make_trainer(config=logra.Config(rank=4, max_grad_norm=own_norm), max_grad_norm=trl_norm)
    assert trainer.create_optimizer().config.max_grad_norm == expected


def test_the_logged_norm_is_that_of_the_recovered_gradient(
    model, make_model, tokenizer, dataset, make_args, num_letters
):
    # The full-rank two-sided sketch recovers the gradient exactly, so its norm is that of a dense run on the same data.
    from logra.rl.grpo import CheckedGRPOTrainer

    args = {"max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 1e-6}
    dense_model = make_model()
    for name, parameter in dense_model.named_parameters():
        parameter.requires_grad_("proj" in name)
    common = {"reward_funcs": num_letters, "train_dataset": dataset, "processing_class": tokenizer}
    dense = CheckedGRPOTrainer(model=dense_model, args=make_args(**args), **common)
    dense.train()
    sketched = GRPOTrainer(model=model, args=make_args(**args), logra=logra.Config(rank=48), **common)
    sketched.train()
    assert logs_of(sketched)[0]["grad_norm"] == pytest.approx(logs_of(dense)[0]["grad_norm"], rel=1e-3)


def test_save_model_gives_a_plain_folder(make_trainer, model, tmp_path):
    trainer = make_trainer()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(model)
    ids = torch.arange(2, 12)[None]
    model.eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    keys = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert keys["architectures"] == ["LlamaForCausalLM"]


def test_resuming_continues_with_the_same_bits(make_trainer, make_model, tmp_path):
    # Catches state that accelerate or transformers lose on the way through state_dict.
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "output_dir": str(tmp_path / "run")}
    make_trainer(policy=(straight := make_model()), **options).train()
    resumed_model = make_model(seed=5)
    resumed = make_trainer(policy=resumed_model, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert resumed.sketch_optimizer.version == 2
    for name, value in straight.named_parameters():
        assert torch.equal(value, resumed_model.get_parameter(name)), name


def test_activation_checkpointing_changes_nothing(make_trainer, make_model):
    norms = []
    for flag in (False, True):
        trainer = make_trainer(policy=make_model(), activation_checkpointing=flag, max_steps=1)
        trainer.train()
        norms.append(logs_of(trainer)[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"fp16": True, "bf16": False, "use_cpu": False}, "fp16"), ({"torch_compile": True}, "torch_compile")],
)
def test_refused_arguments(make_args, num_letters, overrides, message):
    args = make_args()
    for name, value in overrides.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(model="never-loaded", reward_funcs=num_letters, args=args, train_dataset=[1])


def test_checkpoints_of_every_machine_are_refused_on_replicas(make_args, monkeypatch, num_letters):
    """Catches checkpoints of machines whose processes have a part of the moments only."""
    args = make_args()
    args.save_on_each_node = True
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ConfigError, match="save_on_each_node=True"):
        GRPOTrainer(model="never-loaded", reward_funcs=num_letters, args=args, train_dataset=[1])


def test_deepspeed_is_refused_before_the_model_loads(make_args, monkeypatch, num_letters):
    args = make_args()
    args.deepspeed = "zero3.json"
    with pytest.raises(ConfigError, match="deepspeed"):
        GRPOTrainer(model="never-loaded", reward_funcs=num_letters, args=args, train_dataset=[1])
    args.deepspeed = None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # what `accelerate launch` sets
    with pytest.raises(ConfigError, match="deepspeed"):
        GRPOTrainer(model="never-loaded", reward_funcs=num_letters, args=args, train_dataset=[1])


@pytest.mark.parametrize(
    ("settings", "overrides", "message"),
    [
        ({"FSDP_VERSION": "1"}, {}, "fsdp_version=1"),
        ({}, {}, "fsdp_version=1"),  # what accelerate takes where nothing is said
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, {}, "fsdp_offload_params"),
        ({"FSDP_VERSION": "2"}, {"use_vllm": True}, "use_vllm=True with fsdp"),
        ({}, {"fsdp": True, "fsdp_plugin_args": {"fsdp_version": 1}}, "fsdp_version=1"),
    ],
)
def test_fsdp_settings_are_refused_before_the_model_loads(
    make_args, monkeypatch, num_letters, settings, overrides, message
):
    args = make_args()
    for name, value in overrides.items():
        setattr(args, name, value)
    for name, value in (settings | {"ACCELERATE_USE_FSDP": "true"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(model="never-loaded", reward_funcs=num_letters, args=args, train_dataset=[1])


def test_fsdp_that_accelerate_ignores_is_refused(make_trainer, monkeypatch):
    # Catches whole replicas in every process where shards were asked for.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ConfigError, match=r"fsdp: accelerate has no FSDP for .*NO"):
        make_trainer()


def test_lora_is_refused(model, dataset, make_args, num_letters):
    with pytest.raises(ConfigError, match="peft_config"):
        GRPOTrainer(
            model="never-loaded",
            reward_funcs=num_letters,
            args=make_args(),
            train_dataset=dataset,
            peft_config=LoraConfig(),
        )
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="peft_config"):
        GRPOTrainer(model=adapted, reward_funcs=num_letters, args=make_args(), train_dataset=dataset)


def test_optimizers_argument(model, tokenizer, dataset, make_args, num_letters):
    common = {
        "model": model,
        "reward_funcs": num_letters,
        "train_dataset": dataset,
        "processing_class": tokenizer,
    }
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="AdamW"):
        GRPOTrainer(args=make_args(), optimizers=(adam, None), **common)
    own = logra.SketchOptimizer(model, rank=4)
    with pytest.raises(ConfigError, match="not both"):
        GRPOTrainer(args=make_args(), optimizers=(own, None), logra=logra.Config(), **common)
    trainer = GRPOTrainer(args=make_args(), optimizers=(own, None), **common)
    trainer.train()
    assert trainer.sketch_optimizer is own
    assert own.version == 2


@pytest.mark.parametrize(("own_norm", "expected"), [(None, 0.5), (0.1, 0.1)])
def test_a_given_optimizer_is_clipped_and_timed_like_a_built_one(
    model, tokenizer, dataset, make_args, num_letters, own_norm, expected
):
    own = logra.SketchOptimizer(model, rank=4, trust=TRUST, max_grad_norm=own_norm)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=num_letters,
        args=make_args(max_grad_norm=0.5, max_steps=1),
        train_dataset=dataset,
        processing_class=tokenizer,
        optimizers=(own, None),
    )
    assert own.config.max_grad_norm == expected
    trainer.train()
    assert logs_of(trainer)[0]["time/probe_s"] > 0


def test_training_raises_the_reward(model, tokenizer, dataset, make_args, num_letters):
    # The one thing that must work: a reward that is easy to raise is raised.
    args = make_args(max_steps=12, per_device_train_batch_size=8, num_generations=8)
    trust = logra.TrustRegion(kl_budget=0.1, alpha_max=1e6)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=num_letters,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        logra=logra.Config(rank=8, trust=trust),
    )
    trainer.train()
    rewards = [entry["reward/mean"] for entry in logs_of(trainer)]
    assert math.fsum(rewards[-3:]) / 3 > math.fsum(rewards[:3]) / 3 + 0.05


def test_training_again_after_an_error_starts_a_clean_step(make_trainer, make_model):
    """Fails if the micro-batch before the error stays in the sketches and in the probe of the next train()."""
    norms = []
    for fails in (True, False):
        trainer = make_trainer(policy=make_model(), max_steps=1)
        if fails:
            compute_loss = trainer.compute_loss
            calls = []

            def fail_once(*args, compute_loss=compute_loss, calls=calls, **kwargs):
                calls.append(None)
                if len(calls) == 2:
                    raise RuntimeError("second micro-batch")
                return compute_loss(*args, **kwargs)

            trainer.compute_loss = fail_once
            with pytest.raises(RuntimeError, match="second micro-batch"):
                trainer.train()
            trainer._buffered_inputs = None  # TRL's; both generate anew, with the same random numbers
            trainer._step = 0
        torch.manual_seed(0)
        trainer.train()
        norms.append(logs_of(trainer)[-1]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_settings_that_are_no_config_are_refused_before_the_model_loads(make_args, num_letters):
    settings: Any = {"lr": 1}
    with pytest.raises(ConfigError, match=r"logra=\{'lr': 1\}: a logra.Config is needed"):
        GRPOTrainer(model="./never-loaded", reward_funcs=num_letters, args=make_args(), logra=settings)


def test_diagnostics_join_the_metrics_and_change_nothing(make_trainer, make_model, tokenizer):
    """Measured in the first and third step, on the step's own responses; weights end with the same bits as without."""
    models = [make_model(), make_model()]
    plain = make_trainer(policy=models[0], max_steps=3)
    plain.train()
    probes = [
        DirectionProbe(layers=("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"), every=2),
        CollateralProbe(["a text", "and another"], tokenizer, every=2),
    ]
    trainer = make_trainer(policy=models[1], max_steps=3, diagnostics=probes)
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    logs = logs_of(trainer)
    names = {name for name in logs[0] if name.startswith("direction/")}
    assert {"direction/gradient_cosine", "direction/rank/model.layers.1.mlp.up_proj", "direction/step_gain",
            "direction/update_fisher_cosine", "direction/collateral"} <= names  # fmt: skip
    assert {name for name in logs[2] if name.startswith("direction/")} == names
    assert not any(name.startswith("direction/") for name in logs[1])
    assert all(("time/diagnostics_s" in entry) == (index != 1) for index, entry in enumerate(logs))
    for entry in (logs[0], logs[2]):
        # The trust region priced the same rounded step on responses of its own; these are the same order of magnitude.
        assert 0.1 < entry["direction/task_kl"] / entry["trust/realised_kl"] < 10
        assert entry["direction/dense_gain"] > 0


def test_diagnostics_without_a_trust_region(make_trainer):
    trainer = make_trainer(config=logra.Config(rank=4, lr=1e-4), max_steps=1, diagnostics=[DirectionProbe(2, every=1)])
    trainer.train()
    assert "direction/step_gain" in logs_of(trainer)[0]
