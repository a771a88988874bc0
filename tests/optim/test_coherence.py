"""Coherence of successive gradients: the formula, and what a step makes of it."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import logra
from logra.contracts import TrustDecision, TrustVerdict
from logra.errors import ConfigError
from logra.optim.coherence import Coherence

TARGETS = ("q_proj", "k_proj", "o_proj")
BETA = 0.9


def averaged(gradients):
    """‖M‖ / (1 - βᵗ) and the average after these gradients, vectors, from the definitions."""
    momentum, coherence = torch.zeros_like(gradients[0]), Coherence()
    for gradient in gradients:
        momentum = BETA * momentum + (1 - BETA) * gradient
        coherence = coherence.after(gradient.norm().item())
    return momentum.norm().item() / (1 - BETA ** len(gradients)), coherence


@pytest.mark.parametrize("count", [1, 2, 30])
def test_equal_gradients_are_fully_coherent(count):
    norm, coherence = averaged([torch.tensor([3.0, 4.0], dtype=torch.float64)] * count)
    assert coherence.of(norm) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("count", [2, 5, 200])
def test_gradients_with_nothing_in_common_cancel(count):
    """‖M‖² of orthogonal unit gradients is (1-β)² Σ β²ᵏ, whose limit over (1 - βᵗ)² is (1-β) / (1+β)."""
    norm, coherence = averaged(list(torch.eye(count, dtype=torch.float64)))
    expected = (1 - BETA) * math.sqrt(sum(BETA ** (2 * k) for k in range(count))) / (1 - BETA**count)
    assert coherence.of(norm) == pytest.approx(expected, rel=1e-9)
    if count == 200:
        assert expected == pytest.approx(math.sqrt(0.1 / 1.9), rel=1e-4)


def test_a_small_gradient_after_large_ones_gets_a_small_share_and_a_large_one_no_more_than_all():
    small = [torch.eye(2)[0]] * 20 + [0.01 * torch.eye(2)[1]] * 20
    norm, coherence = averaged(small)
    assert coherence.of(norm) < 0.25
    norm, coherence = averaged([0.01 * torch.eye(2)[0]] * 20 + [torch.eye(2)[0]] * 20)
    assert coherence.of(norm) == 1.0


class Recording:
    """A policy that proposes half the step and accepts, and keeps what it was asked to verify."""

    def __init__(self):
        self.budgets = []

    def make_probe(self, **tensors):
        return tensors

    def predict(self, model, probe, deltas, *, step, mismatch=0.0, dense):
        return TrustDecision(0.5, predicted_kl=0.4, budget=0.1)

    def verify(self, model, probe, deltas, *, budget, attempt, dense):
        self.budgets.append(budget)
        return TrustVerdict(budget, "accept", 1.0)

    def snapshot(self, model, probe):
        return None

    def merged_kl(self, model, probe, snapshot):
        raise AssertionError("there is no snapshot")


def build(model, **settings):
    config = {"lr": 0.02, "rank": 8, "target_modules": TARGETS, "coherence_scaling": True, "factor_bits": 8}
    return logra.SketchOptimizer(model, **config | settings)


def step(model, opt, ids):
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    if opt.config.trust is not None:
        ones = torch.ones_like(ids)
        opt.set_probe(input_ids=ids, attention_mask=ones, loss_mask=ones)
    opt.step()
    opt.zero_grad()
    return opt.diagnostics()


def test_length_and_budget_follow_the_dense_gradients(make_lm, token_ids):
    """Against the formula on dense fp64 gradients. Four tokens a step: gradients of rank 3 and 6 lose nothing at rank 8."""
    model, dense = make_lm(), make_lm().double()
    policy = Recording()
    opt = build(model, trust=policy)
    names = [target.fqn for target in opt.targets]
    gradients = []
    for ids in (token_ids[:1, :4], token_ids[1:2, 4:8]):
        dense.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        dense.zero_grad()
        F.cross_entropy(dense(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        parameters = dict(dense.named_parameters())
        gradients.append(torch.cat([parameters[name].grad.flatten() for name in names]))
        norm, coherence = averaged(gradients)
        expected = coherence.of(norm)
        found = step(model, opt, ids)
        assert found["coherence"] == pytest.approx(expected, rel=1e-3)
        assert found["alpha"] == pytest.approx(0.5 * expected, rel=1e-3)
        assert policy.budgets[-1] == found["kl_budget"] == pytest.approx(0.1 * expected**2, rel=2e-3)
        assert found["update_ratio"] == pytest.approx(0.02 * 0.5 * expected, rel=0.02)
    assert expected < 0.9  # the second step tells the formula from 1


def test_without_a_trust_region_the_length_is_shared_out_too(make_lm, token_ids):
    model = make_lm()
    opt = build(model)
    first, second = (step(model, opt, ids) for ids in (token_ids[:1], token_ids[1:2]))
    assert first["coherence"] == pytest.approx(1.0, rel=1e-6)
    assert second["coherence"] < 0.9
    assert second["update_ratio"] == pytest.approx(0.02 * second["coherence"], rel=0.02)


@pytest.mark.parametrize("trust", [None, Recording()], ids=["in full", "trust"])
def test_an_inner_adamw_takes_its_share_and_does_not_enter_the_average(make_lm, token_ids, trust):
    """The dense step from AdamW's formula on the moments that it left; the gradient of the embedding outweighs the others."""
    model = make_lm()
    opt = build(model, trust=trust, non_target="adamw", non_target_lr=1e-2)
    embedding = model.embed.weight
    for ids, least, most in ((token_ids[:1, :4], 1 - 1e-6, 1.0), (token_ids[1:2, 4:8], 0.3, 0.9)):
        before = embedding.detach().clone()
        found = step(model, opt, ids)
        assert least <= found["coherence"] <= most
        moments = opt.state[embedding]
        mean = moments["exp_avg"] / (1 - 0.9 ** moments["step"])
        root = (moments["exp_avg_sq"] / (1 - 0.999 ** moments["step"])).sqrt() + 1e-8
        length = 1e-2 * found["coherence"] * (1.0 if trust is None else 0.5)
        torch.testing.assert_close(before - embedding.detach(), length * mean / root, rtol=1e-4, atol=1e-6)


def test_targets_that_take_turns_are_fully_coherent():
    """As experts do: each has one gradient whenever it moves, and fewer of them than the optimizer has updates."""
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("q_proj", "k_proj")})
    opt = build(model, target_modules=("q_proj", "k_proj"))
    for name in ("q_proj", "q_proj", "k_proj", "q_proj", "k_proj"):
        model[name](torch.arange(8.0)).sum().backward()
        opt.step()
        opt.zero_grad()
        assert opt.diagnostics()["coherence"] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("factor", [1e-22, 1e20])
def test_the_size_of_the_gradients_means_nothing(make_lm, token_ids, factor):
    """Also where their squares leave the range of fp32."""
    found = {}
    for size in (1.0, factor):
        model = make_lm()
        opt = build(model)
        for ids in (token_ids[:1], token_ids[1:2]):
            (size * F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())).backward()
            opt.step()
            opt.zero_grad()
        found[size] = opt.diagnostics()["coherence"]
    assert found[factor] == pytest.approx(found[1.0], rel=1e-3)


def test_a_skipped_step_leaves_the_average_alone_and_a_restart_begins_it_anew(make_lm, token_ids):
    model = make_lm()
    opt = build(model)
    step(model, opt, token_ids[:1])
    kept = copy.deepcopy(opt.param_groups[0]["coherence"])
    opt.skip_step("for the test")
    step(model, opt, token_ids[1:2])
    assert opt.param_groups[0]["coherence"] == kept and kept[0] == 1
    opt.restart()
    assert step(model, opt, token_ids[1:2])["coherence"] == pytest.approx(1.0, rel=1e-6)


def test_clipped_gradients_enter_the_average_as_they_enter_the_momentum(make_lm, token_ids):
    """Clipping divides both by one number: the first step stays fully coherent, whatever the limit."""
    model = make_lm()
    opt = build(model, max_grad_norm=1e-3)
    assert step(model, opt, token_ids)["coherence"] == pytest.approx(1.0, rel=1e-3)
    assert opt.param_groups[0]["coherence"][1] == pytest.approx(0.01 * 1e-6, rel=1e-3)


def test_the_average_is_saved_and_cannot_join_later(make_lm, token_ids):
    model = make_lm()
    opt = build(model)
    step(model, opt, token_ids[:1])
    other = build(make_lm())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert other.param_groups[0]["coherence"] == opt.param_groups[0]["coherence"] != [0, 0.0]
    plain = build(make_lm(), coherence_scaling=False)
    with pytest.raises(ConfigError, match=r"coherence_scaling=None \(here True\)"):
        build(make_lm()).load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.0}, {"sketch": "one_sided", "direction": "row_adam", "refresh_every": 5}]
)
def test_settings_that_have_nothing_to_compare_are_refused(settings):
    with pytest.raises(ConfigError, match=r"Set these, or coherence_scaling=False"):
        logra.Config(coherence_scaling=True, **settings)
