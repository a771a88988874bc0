"""How the optimizer uses a trust policy: what it is shown, and that nothing is written before it accepts."""

import copy

import pytest
import torch
from torch.nn import functional as F

import logra
from logra.contracts import TrustDecision, TrustVerdict
from logra.errors import ConfigError, NonFiniteProbeError, ProbeError

TARGETS = ("q_proj", "k_proj", "o_proj")


class ScriptedPolicy:
    """Answers from lists, and records what it is asked."""

    def __init__(self, alpha=0.5, verdicts=("accept",)):
        self.alpha, self.verdicts = alpha, list(verdicts)
        self.proposed, self.rounded, self.steps = [], [], []

    def make_probe(self, **tensors):
        return tensors

    def predict(self, model, probe, deltas, *, step, mismatch=0.0):
        self.proposed.append(deltas)
        self.steps.append((step, mismatch))
        return TrustDecision(self.alpha, predicted_kl=0.4, budget=0.1)

    def verify(self, model, probe, deltas, *, budget, attempt):
        assert budget == 0.1
        self.rounded.append(deltas)
        action = self.verdicts[attempt]
        return TrustVerdict(0.2, action, 0.5 if action == "shrink" else 1.0)


def build(model, policy, **settings):
    return logra.SketchOptimizer(
        model, lr=0.02, rank=8, target_modules=TARGETS, trust=policy, **{"factor_bits": 8, **settings}
    )


def backward(model, ids):
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


def probe(opt, ids, **kwargs):
    opt.set_probe(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=torch.ones_like(ids), **kwargs)


def test_the_step_is_scaled_by_alpha_and_the_rounded_update_is_what_is_verified(tiny_lm, token_ids):
    policy = ScriptedPolicy(alpha=0.5)
    opt = build(tiny_lm, policy)
    backward(tiny_lm, token_ids)
    probe(opt, token_ids, mismatch=0.01)
    opt.step()
    assert policy.steps == [(0, 0.01)]
    assert opt.diagnostics()["update_ratio"] == pytest.approx(0.01, rel=0.02)
    assert opt.diagnostics()["alpha"] == 0.5
    assert opt.diagnostics()["predicted_kl"] == 0.4
    assert opt.diagnostics()["realised_kl"] == 0.2
    for target in opt.targets:
        verified = policy.rounded[0][target.module]
        merged = opt.last_update.weights[target.fqn].dense()
        # The verified factors are the merged integers, not the unrounded proposal.
        torch.testing.assert_close(verified.out_factor @ verified.in_factor, merged, rtol=1e-6, atol=0)
        proposed = policy.proposed[0][target.module]
        assert not torch.equal(0.5 * proposed.out_factor @ proposed.in_factor, merged)


def test_shrinking_repeats_until_accepted(tiny_lm, token_ids):
    opt = build(tiny_lm, ScriptedPolicy(alpha=1.0, verdicts=("shrink", "shrink", "accept")))
    backward(tiny_lm, token_ids)
    probe(opt, token_ids)
    opt.step()
    assert opt.diagnostics()["alpha"] == 0.25
    assert opt.diagnostics()["num_shrinks"] == 2
    assert opt.diagnostics()["update_ratio"] == pytest.approx(0.005, rel=0.02)


@pytest.mark.parametrize("verdicts", [("reject",), ("shrink", "reject")])
def test_a_rejected_step_changes_nothing(tiny_lm, token_ids, verdicts):
    opt = build(tiny_lm, ScriptedPolicy(verdicts=verdicts), weight_decay=1.0)
    before, state = copy.deepcopy(tiny_lm.state_dict()), copy.deepcopy(opt.state_dict()["state"])
    backward(tiny_lm, token_ids)
    probe(opt, token_ids)
    opt.step()
    assert (opt.last_skip, opt.last_update, opt.version, opt.num_skipped) == ("trust_rejected", None, 0, 1)
    assert all(torch.equal(before[name], value) for name, value in tiny_lm.state_dict().items())
    assert state == opt.state_dict()["state"] == {}


def test_a_probe_that_is_not_finite_skips_the_step(tiny_lm, token_ids):
    class Broken(ScriptedPolicy):
        def predict(self, *args, **kwargs):
            raise NonFiniteProbeError("logits are not finite")

    opt = build(tiny_lm, Broken())
    backward(tiny_lm, token_ids)
    probe(opt, token_ids)
    opt.step()
    assert (opt.last_skip, opt.version) == ("non_finite_probe", 0)


def test_a_missing_probe_is_an_error_and_one_probe_serves_one_step(tiny_lm, token_ids):
    opt = build(tiny_lm, ScriptedPolicy())
    backward(tiny_lm, token_ids)
    with pytest.raises(ProbeError, match="set_probe"):
        opt.step()
    # Nothing was lost: with a probe the same step goes through.
    probe(opt, token_ids)
    opt.step()
    assert opt.version == 1
    backward(tiny_lm, token_ids)
    with pytest.raises(ProbeError, match="before every step"):
        opt.step()


def test_a_repeated_step_clips_dense_gradients_once(make_lm, token_ids):
    """Clipped before the error and again at the repetition, the inner AdamW would see another gradient."""
    grads = []
    for forget_the_probe in (False, True):
        model = make_lm()
        opt = build(model, ScriptedPolicy(), non_target="adamw", max_grad_norm=0.01)
        backward(model, token_ids)
        if forget_the_probe:
            with pytest.raises(ProbeError):
                opt.step()
        probe(opt, token_ids)
        opt.step()
        grads.append(model.lm_head.weight.grad)
    assert torch.equal(grads[0], grads[1])


def test_a_zero_gradient_does_not_ask_the_policy(tiny_lm, token_ids):
    policy = ScriptedPolicy()
    opt = build(tiny_lm, policy)
    (0.0 * tiny_lm(token_ids).sum()).backward()
    opt.step()
    assert opt.last_skip == "zero_gradient"
    assert policy.proposed == []


def test_the_first_step_of_a_warm_up_is_not_priced(tiny_lm, token_ids):
    """Its learning rate is 0: a real trust region refuses to price a change that is zero."""
    opt = build(tiny_lm, logra.TrustRegion())
    opt.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(tiny_lm.state_dict())
    backward(tiny_lm, token_ids)
    opt.step()
    assert (opt.last_skip, opt.version) == (None, 1)
    assert all(torch.equal(before[name], value) for name, value in tiny_lm.state_dict().items())


def test_set_probe_without_trust_is_an_error(tiny_lm, token_ids):
    opt = logra.SketchOptimizer(tiny_lm, target_modules=TARGETS)
    with pytest.raises(ConfigError, match="needs a trust region"):
        probe(opt, token_ids)
