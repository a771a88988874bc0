"""Guards inside a training: what they do to rewards, batches, loss, steps, weights and the log of updates."""

import json
import math

import pytest
import torch
from transformers import TrainerCallback

import logra
from logra.errors import ConfigError, DataError
from logra.rl import GRPOTrainer
from logra.rl.guarded import GuardedGRPOTrainer, GuardState
from logra.rl.guards.config import GuardsConfig, KLPenalty, ReferenceReset, Rollback, Rule, Sentinels
from logra.sync import DirectoryLog, Publisher, Replica

RULE_OFF = {name: Rule(threshold=1.0, action="off") for name in Sentinels().rules()}


def only(**rules) -> Sentinels:
    """Sentinels of which only these are on."""
    return Sentinels(**(RULE_OFF | rules))


@pytest.fixture
def make_trainer(model_folder, tokenizer, dataset, make_args, num_letters):
    def make(kind=GRPOTrainer, reward=num_letters, guards=None, logra_config=None, **overrides):
        own = {} if kind is GuardedGRPOTrainer else {"logra": logra_config or logra.Config(rank=4, lr=1e-3)}
        return kind(
            model=str(model_folder),
            reward_funcs=reward,
            args=make_args(**({"model_init_kwargs": {"dtype": "float32"}} | overrides)),
            train_dataset=dataset,
            processing_class=tokenizer,
            guards=guards,
            **own,
        )

    return make


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_a_bad_reward_drops_its_group_and_is_counted(make_trainer, num_letters):
    def sometimes_nan(completions, **kwargs):
        values = num_letters(completions)
        values[1], values[6] = math.nan, None  # the second group has only one that cannot be scored
        return values

    trainer = make_trainer(reward=sometimes_nan, guards=GuardsConfig(on_bad_reward="drop"), max_steps=1)
    batches, events = [], []
    original = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(original(inputs)) or batches[-1]
    trainer.guards.subscribe(events.append)
    trainer.train()
    advantages = batches[0]["advantages"]
    assert (advantages[:4] == 0).all()  # also of the completions beside it
    assert advantages[6] == 0 and (advantages[[4, 5, 7]] != 0).any()
    assert advantages.isfinite().all()
    assert [(event.kind, event.value, event.action) for event in events if event.kind == "bad_reward"] == [
        ("bad_reward", 1.0, "drop")
    ]
    assert logs_of(trainer)[0]["guards/bad_rewards"] == 1.0
    assert trainer.sketch_optimizer.version == 1  # the other group was learned from


def test_a_bad_reward_ends_the_run_where_it_is_not_to_be_dropped(make_trainer):
    trainer = make_trainer(reward=lambda completions, **_: [math.nan] * len(completions), guards=GuardsConfig())
    with pytest.raises(DataError, match=r"guards\.on_bad_reward=drop"):
        trainer.train()


def test_without_any_signal_the_search_ends_with_the_reason(make_trainer):
    calls = []

    def constant(completions, **_):
        calls.append(len(completions))
        return [0.25] * len(completions)

    trainer = make_trainer(reward=constant, guards=GuardsConfig(resample=True))
    with pytest.raises(DataError, match=r"of 22 groups none has a signal.*22 with reward 0\.25"):
        trainer.train()
    assert calls == [8] * 11  # the step's own batch, and ten more


def test_groups_without_signal_are_replaced(make_trainer, num_letters):
    def dull_at_first(completions, **_):
        rounds.append(len(completions))
        values = num_letters(completions)
        if len(rounds) == 1:
            values[:4] = [0.5] * 4
        return values

    rounds, batches = [], []
    trainer = make_trainer(reward=dull_at_first, guards=GuardsConfig(resample=True), max_steps=1)
    original = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(original(inputs)) or batches[-1]
    trainer.train()
    (batch,) = batches
    assert len(rounds) >= 2 and logs_of(trainer)[0]["guards/resampled_batches"] == len(rounds) - 1
    assert (batch["advantages"].view(2, 4) != 0).any(dim=1).all()
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    # Completions of a group belong to one prompt.
    for group in batch["prompt_ids"].view(2, 4, -1):
        assert (group == group[0]).all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_term_joins_the_loss(make_trainer, estimator):
    # TRL's own k3 term, which is left out, is the oracle for k3 with a wide clamp.
    config = GuardsConfig(kl=KLPenalty(estimator=estimator, clamp=50.0), sentinels=only())
    trainers = [make_trainer(GuardedGRPOTrainer, guards=guards, beta=0.3, max_steps=1) for guards in (config, None)]
    with torch.no_grad():
        for trainer in trainers:
            trainer.ref_model.lm_head.weight.mul_(0.7)
    losses = []
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.model.train()
        inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        trainer.current_gradient_accumulation_steps = 2
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append((loss.item(), trainer.model.model.layers[0].self_attn.q_proj.weight.grad.clone()))
        assert trainer.beta == 0.3
    (own, own_grad), (trl, trl_grad) = losses
    if estimator == "k3":
        assert own == pytest.approx(trl, rel=1e-5)
        torch.testing.assert_close(own_grad, trl_grad, rtol=1e-4, atol=1e-7)
    else:
        assert own != pytest.approx(trl, rel=1e-3)


def test_skip_leaves_weights_and_version(make_trainer):
    guards = GuardsConfig(sentinels=only(entropy_floor=Rule(threshold=100.0, action="skip")))
    for kind in (GRPOTrainer, GuardedGRPOTrainer):
        trainer = make_trainer(kind, guards=guards)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()), kind
        assert trainer.guards.counts["entropy_floor"] == 2
        assert logs_of(trainer)[-1]["guards/entropy_floor_events"] == 2
    trainer = make_trainer(guards=guards, max_steps=1)
    trainer.train()
    assert trainer.sketch_optimizer.last_skip == "guard" and trainer.sketch_optimizer.version == 0


def test_stop_ends_the_training_after_the_step(make_trainer):
    guards = GuardsConfig(sentinels=only(entropy_floor=Rule(threshold=100.0, action="stop")))
    trainer = make_trainer(guards=guards, max_steps=5)
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.wants_to_stop


@pytest.mark.parametrize("storage", ["fp32", "split32", "split24"])
def test_rollback_restores_a_version_exactly_and_replicas_follow(make_trainer, tmp_path, storage):
    class EntropyCollapsesAt(TrainerCallback):
        """Makes the entropy of step 5 look collapsed, and keeps the weights of every version."""

        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 4:
                trainer._metrics["train"]["entropy"].append(-1e6)

        def on_step_end(self, args, state, control, **_):
            after[state.global_step] = {k: v.detach().clone() for k, v in trainer.model.named_parameters()}

    sentinels = only(entropy_floor=Rule(threshold=0.0, action="rollback"))
    guards = GuardsConfig(sentinels=sentinels, rollback=Rollback(lag=2, budget_factor=0.25))
    trust = logra.TrustRegion(kl_budget=1e-2, alpha_max=1e6, min_tokens=8)
    config = logra.Config(rank=4, lr=1e-3, trust=trust, weight_storage=storage)
    dtype = "float32" if storage == "fp32" else "bfloat16"
    trainer = make_trainer(guards=guards, logra_config=config, max_steps=6, model_init_kwargs={"dtype": dtype})
    start = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.create_optimizer()
    log, after, events = DirectoryLog(tmp_path / "updates"), {}, []
    trainer.publish_to(Publisher(log, trainer.sketch_optimizer, digest_every=1))
    trainer.guards.subscribe(events.append)
    trainer.add_callback(EntropyCollapsesAt())
    trainer.train()

    assert [(event.step, event.kind, event.action) for event in events] == [
        (5, "entropy_floor", "rollback"),
        (5, "rollback", "rollback"),
    ]
    # Step 5 was skipped at version 4. Two steps of lag before it lies version 3, whose weights are now version 5.
    assert events[1].value == 3.0
    assert trainer.sketch_optimizer.version == log.latest() == 6
    assert all(torch.equal(value, after[3][name]) for name, value in after[5].items())
    assert not all(torch.equal(value, after[4][name]) for name, value in after[5].items())
    # Moments are gone: only the step after the rollback is in them.
    target = trainer.sketch_optimizer.targets[0]
    assert trainer.sketch_optimizer.state[target.parameter]["step"] == 1
    logs = logs_of(trainer)
    assert logs[5]["trust/budget"] == pytest.approx(0.25 * logs[3]["trust/budget"])
    assert logs[4]["sync/version"] == 5.0
    # A replica that follows the log sees nothing special; every digest agrees.
    model = type(trainer.model)(trainer.model.config).to(next(iter(start.values())).dtype)
    model.load_state_dict(start, strict=False)
    replica = Replica(model, version=0, storage=storage)
    replica.catch_up(log)
    assert replica.verified_version == 6
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(trainer.model.named_parameters())[name]), name


def test_rollback_needs_the_log_of_updates(make_trainer):
    guards = GuardsConfig(sentinels=only(entropy_floor=Rule(threshold=0.0, action="rollback")))
    with pytest.raises(ConfigError, match="publish_to"):
        make_trainer(guards=guards).train()
    with pytest.raises(ConfigError, match="rollback needs"):
        make_trainer(GuardedGRPOTrainer, guards=guards)


def test_the_reference_becomes_the_policy(make_trainer):
    reset = ReferenceReset(every_steps=2, reset_optimizer=True)
    trainer = make_trainer(guards=GuardsConfig(reference=reset), beta=1e-3, max_steps=3)
    events = []
    trainer.guards.subscribe(events.append)
    start = {name: value.clone() for name, value in trainer.ref_model.state_dict().items()}
    at_reset = {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                at_reset.update({name: value.clone() for name, value in trainer.model.state_dict().items()})

    trainer.add_callback(Look())
    trainer.train()
    reference = trainer.ref_model.state_dict()
    assert all(torch.equal(reference[name], value) for name, value in at_reset.items())
    assert not all(torch.equal(start[name], value) for name, value in reference.items())
    assert [(event.step, event.kind, event.action) for event in events if event.action == "reset"] == [
        (2, "reference_every_steps", "reset")
    ]
    assert trainer.guards.reference_version == 2
    assert trainer.sketch_optimizer.state[trainer.sketch_optimizer.targets[0].parameter]["step"] == 1
    kls = [entry["kl"] for entry in logs_of(trainer)]
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and kls[1] > 0 and kls[2] == pytest.approx(0.0, abs=1e-6)


def test_validations_are_metrics(make_trainer):
    trainer = make_trainer(guards=GuardsConfig(validate_every=2), max_steps=2)
    trainer.validate = lambda: 0.75
    trainer.train()
    assert "heldout/score" not in logs_of(trainer)[0] and logs_of(trainer)[1]["heldout/score"] == 0.75


def test_truncated_completions_are_left_out_of_the_loss(make_trainer):
    trainer = make_trainer(guards=GuardsConfig(), mask_truncated_completions=True, max_steps=2)
    trainer.train()
    for entry in logs_of(trainer):
        # A tiny random policy hardly ever ends by itself.
        assert entry["guards/filtered"] >= entry["completions/clipped_ratio"]


def test_default_guards_change_nothing(make_trainer):
    weights = []
    for guards in (None, GuardsConfig()):
        trainer = make_trainer(guards=guards, epsilon_high=0.28)
        torch.manual_seed(0)
        trainer.train()
        assert all("policy/entropy" in entry for entry in logs_of(trainer))
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_state_of_guards_survives(make_trainer):
    config = GuardsConfig(reference=ReferenceReset(every_steps=1))
    trust = logra.TrustRegion(kl_budget=1e-2, alpha_max=1e6, min_tokens=8)
    trainers = [
        make_trainer(guards=config, logra_config=logra.Config(rank=4, trust=trust), beta=1e-3, max_steps=1)
        for _ in "ab"
    ]
    first, second = trainers
    first.train()
    first.guards.budget_scale = 0.5
    second.create_optimizer()
    states = [next(c for c in t.callback_handler.callbacks if isinstance(c, GuardState)) for t in trainers]
    state = states[0].state_dict()
    states[1].load_state_dict(json.loads(json.dumps({"guards": state["guards"]})) | {"reference": state["reference"]})
    assert second.guards.state_dict() == first.guards.state_dict()
    assert second.guards.state_dict()["versions"] == [[1, True]]
    assert second.sketch_optimizer.config.trust.budget_scale == 0.5
    for name, value in second.ref_model.state_dict().items():
        assert torch.equal(value, first.ref_model.state_dict()[name])
