"""A dense optimizer under a KL budget: scaled, skipped and logged like a sketched step."""

import copy

import pytest
import torch
from torch.nn import functional as F

import logra
from logra.errors import ProbeError
from logra.rl.config import TrainConfig
from logra.rl.priced import PricedGRPOTrainer
from logra.rl.priced_step import PricedStep
from logra.trust.measure import kl_since, probe_logits


def batch():
    ids = torch.randint(3, 40, (4, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    generated = mask.clone()
    generated[:, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": generated, "temperature": 1.0}


def backward(model, ids):
    F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


def build(model, trust, lr=1e-2):
    return PricedStep(torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0), model, trust)


TRUST = logra.TrustRegion(kl_budget=1e-3, alpha_max=1e6, min_tokens=1000)


def test_the_step_is_alpha_times_adamw_s_and_realises_the_budget(model):
    """Catches a displacement of the wrong sign, a step taken twice, and moments that see another gradient."""
    free = copy.deepcopy(model)
    inputs = batch()
    priced = build(model, TRUST)
    reference = torch.optim.AdamW(free.parameters(), lr=1e-2, weight_decay=0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    probe = TRUST.make_probe(**inputs)
    logits = probe_logits(model, probe)
    for policy in (model, free):
        backward(policy, inputs["input_ids"])
    priced.set_probe(**inputs)
    priced.optimizer.step()
    reference.step()
    alpha = priced.diagnostics["alpha"]
    assert 0 < alpha < 1
    for (name, parameter), whole in zip(model.named_parameters(), free.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.detach(), before[name] + alpha * (whole.detach() - before[name]), rtol=1e-5, atol=1e-7
        )
    moved = kl_since(model, probe, logits)
    assert moved == pytest.approx(priced.diagnostics["realised_kl"], rel=0.01)
    assert moved == pytest.approx(1e-3, rel=0.5)
    for own, other in zip(priced.optimizer.state.values(), reference.state.values(), strict=True):
        assert torch.equal(own["exp_avg"], other["exp_avg"])


def test_a_rejected_step_is_not_taken_and_is_counted(model):
    inputs = batch()
    priced = build(model, logra.TrustRegion(kl_budget=1e-9, on_violation="reject", violation_ratio=1.0), lr=1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    backward(model, inputs["input_ids"])
    priced.set_probe(**inputs)
    priced.optimizer.step()
    accepted = priced.diagnostics["realised_kl"] <= 1e-9
    unmoved = all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert unmoved == (not accepted)
    assert priced.num_skipped == int(not accepted)


def test_a_step_without_a_probe_is_an_error_and_moves_nothing(model):
    priced = build(model, TRUST)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    backward(model, batch()["input_ids"])
    with pytest.raises(ProbeError, match="before every step"):
        priced.optimizer.step()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("adapter", [False, True])
def test_dense_baselines_in_trl_log_the_names_of_the_trust_region(
    model, tokenizer, dataset, make_args, num_letters, adapter
):
    """AdamW on all weights and LoRA, whose adapters start at a bilinear zero. Catches a probe of the wrong model."""
    from peft import LoraConfig

    lora: dict = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}
    trainer = PricedGRPOTrainer(
        model=model, reward_funcs=num_letters, args=make_args(learning_rate=1e-2), train_dataset=dataset,
        processing_class=tokenizer, trust=TRUST, **(lora if adapter else {}),
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs
    for entry in logs:
        assert entry["trust/realised_kl"] == pytest.approx(1e-3, rel=0.5)
        assert entry["trust/planned_kl"] == pytest.approx(1e-3, rel=1e-3)
        assert entry["time/probe_s"] > 0


def test_baselines_take_the_trust_region_when_asked():
    config = TrainConfig(output_dir="x", method="adamw", use_trust=True, trust=logra.TrustRegion(kl_budget=0.5))
    assert config.prices_steps
    assert not TrainConfig(output_dir="x", method="lora").prices_steps
    assert TrainConfig(output_dir="x", method="paper").prices_steps
    with pytest.raises(logra.errors.ConfigError, match="use_trust=None"):
        TrainConfig(output_dir="x", method="adamw", trust=logra.TrustRegion(kl_budget=0.5))
