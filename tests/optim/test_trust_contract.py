"""How the optimizer uses a trust policy: what it is shown, and that nothing is written before it accepts."""

import copy

import pytest
import torch
from torch.nn import functional as F

import logra
from logra.contracts import TrustDecision, TrustVerdict
from logra.errors import CaptureError, ConfigError, NonFiniteProbeError, ProbeError

TARGETS = ("q_proj", "k_proj", "o_proj")


class ScriptedPolicy:
    """Answers from lists, and records what it is asked."""

    def __init__(self, alpha=0.5, verdicts=("accept",)):
        self.alpha, self.verdicts = alpha, list(verdicts)
        self.proposed, self.rounded, self.steps = [], [], []
        self.proposed_dense, self.scaled_dense = [], []

    def make_probe(self, **tensors):
        return tensors

    def predict(self, model, probe, deltas, *, step, mismatch=0.0, dense):
        self.proposed.append(deltas)
        self.proposed_dense.append(dense)
        self.steps.append((step, mismatch))
        return TrustDecision(self.alpha, predicted_kl=0.4, budget=0.1)

    def verify(self, model, probe, deltas, *, budget, attempt, dense):
        assert budget == 0.1
        self.rounded.append(deltas)
        self.scaled_dense.append(dense)
        action = self.verdicts[attempt]
        return TrustVerdict(0.2, action, 0.5 if action == "shrink" else 1.0)

    def snapshot(self, model, probe):
        return None

    def merged_kl(self, model, probe, snapshot):
        raise AssertionError("there is no snapshot")


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


def test_the_inner_adamw_is_priced_scaled_and_committed_with_the_targets(make_lm, token_ids):
    """The displacement is AdamW's own; alpha times it is verified and taken, the moments are those of one step.

    Catches moments that move twice, a displacement of the wrong sign, and a step taken in full.
    """
    alone = make_lm()
    reference = build(alone, None, non_target="adamw", non_target_lr=1e-3)
    backward(alone, token_ids)
    before = {name: parameter.detach().clone() for name, parameter in reference._non_targets.parameters.items()}
    reference.step()
    model = make_lm()
    policy = ScriptedPolicy(alpha=0.5, verdicts=("shrink", "accept"))
    opt = build(model, policy, non_target="adamw", non_target_lr=1e-3)
    backward(model, token_ids)
    probe(opt, token_ids)
    opt.step()
    names = {parameter: name for name, parameter in opt._non_targets.parameters.items()}
    assert names.keys() == policy.proposed_dense[0].keys()
    for parameter, displacement in policy.proposed_dense[0].items():
        name = names[parameter]
        whole = before[name] - reference._non_targets.parameters[name]
        torch.testing.assert_close(displacement, whole, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(policy.scaled_dense[0][parameter], 0.5 * displacement)
        torch.testing.assert_close(policy.scaled_dense[1][parameter], 0.25 * displacement)
        assert torch.equal(parameter.detach(), before[name] - 0.25 * displacement)
        assert torch.equal(opt.last_update.tensors[name], parameter.detach())
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            expected = reference.state[reference._non_targets.parameters[name]][moment]
            assert torch.equal(opt.state[parameter][moment], expected)


def test_a_rejected_step_leaves_the_inner_adamw_alone(make_lm, token_ids):
    model = make_lm()
    opt = build(model, ScriptedPolicy(verdicts=("accept", "reject")), non_target="adamw", non_target_lr=1e-3)
    opt.config.trust.verdicts = ["reject"]
    backward(model, token_ids)
    probe(opt, token_ids)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    opt.step()
    assert opt.last_skip == "trust_rejected"
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert not any("exp_avg" in opt.state[parameter] for parameter in opt._non_targets.parameters.values())


def test_the_merged_policy_is_measured_when_asked(make_lm, token_ids):
    """What merging does equals what was verified before it, up to the rounding of W - dW in fp32."""
    model = make_lm()
    trust = logra.TrustRegion(kl_budget=1e-3, measure_merged=True)
    opt = build(model, trust, non_target="adamw", non_target_lr=1e-4)
    backward(model, token_ids)
    generated = torch.ones_like(token_ids)
    generated[:, 0] = 0
    opt.set_probe(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), loss_mask=generated)
    opt.step()
    diagnostics = opt.diagnostics()
    assert diagnostics["merged_kl"] == pytest.approx(diagnostics["realised_kl"], rel=0.01)
    assert diagnostics["realised_kl"] == pytest.approx(1e-3, rel=0.3)


def test_a_repeated_step_is_clipped_as_the_first_attempt(make_lm, token_ids):
    """Fails if a refused clip_grad_norm_ reaches the dense gradients, when the targets' ones are clipped already."""
    results = []
    for ends_in_an_error in (False, True):
        model = make_lm()
        opt = build(model, ScriptedPolicy(), non_target="adamw", max_grad_norm=0.01)
        backward(model, token_ids)
        if ends_in_an_error:
            with pytest.raises(ProbeError):
                opt.step()
            with pytest.raises(CaptureError, match="after a step"):
                opt.clip_grad_norm_(1e-6)
        probe(opt, token_ids)
        opt.step()
        results.append((model.state_dict(), opt.state[model.embed.weight]["exp_avg"]))
    (weights, moment), (repeated, moment_repeated) = results
    assert torch.equal(moment, moment_repeated)
    assert all(torch.equal(value, repeated[name]) for name, value in weights.items())


class Watcher:
    def attached(self, targets): ...

    def detached(self): ...

    def begin_window(self, step): ...

    def observe(self, view):
        return {"num_gradients": float(len({fqn: make() for fqn, make in view.gradients.items()}))}


def test_gradients_that_were_dropped_cannot_be_watched(tiny_lm, token_ids):
    """Fails, with a KeyError or with memory that nobody wrote, if a repeated step shows gradients that became proposals."""
    opt = build(tiny_lm, ScriptedPolicy())
    backward(tiny_lm, token_ids)
    with pytest.raises(ProbeError):
        opt.step()
    opt.add_observer(Watcher())
    probe(opt, token_ids)
    with pytest.raises(CaptureError, match="before it was attached"):
        opt.step()
    assert opt.version == 0
    opt.zero_grad()
    backward(tiny_lm, token_ids)
    opt.step()
    assert opt.diagnostics()["num_gradients"] == len(opt.targets)
