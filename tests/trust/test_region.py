"""Settings, schedule, step length and verdicts. The KL measures are replaced where only the decision is tested."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import logra.trust.region as region_module
from logra.contracts import Delta, TrustPolicy
from logra.errors import ConfigError, NonFiniteProbeError, ProbeError
from logra.trust import TrustRegion, update_mismatch

ANY_DELTAS = {nn.Linear(2, 2): Delta(torch.ones(2, 1), torch.ones(1, 2))}


def test_defaults_are_the_documented_ones():
    region: TrustPolicy = TrustRegion()  # and the protocol is implemented
    assert region == TrustRegion(
        kl_budget=2e-4,
        kl_budget_final=None,
        schedule_steps=300,
        alpha_max=3.0,
        mismatch_correction=True,
        on_violation="shrink",
        violation_ratio=1.5,
        max_shrinks=3,
        method="tangent",
        min_responses=2,
        min_tokens=128,
        max_response_tokens=4096,
        seed=0,
    )


@pytest.mark.parametrize("step", [0, 1, 75, 150, 299, 300, 301, 10_000])
def test_budget_follows_half_a_cosine(step):
    """Catches a linear schedule, a full cosine that rises again after S, and the two ends swapped."""
    region = TrustRegion(kl_budget=2e-4, kl_budget_final=2e-5, schedule_steps=300)
    expected = 2e-5 + (2e-4 - 2e-5) * (1 + math.cos(math.pi * min(step, 300) / 300)) / 2
    assert region.budget_at(step) == pytest.approx(expected, rel=1e-12)
    assert TrustRegion(kl_budget=2e-4).budget_at(step) == pytest.approx(2e-4, rel=1e-12)


@pytest.mark.parametrize(
    ("mismatch", "expected"), [(0.0, 2e-4), (-1.0, 2e-4), (5e-5, 1.5e-4), (1e-4, 1e-4), (1.0, 1e-4)]
)
def test_mismatch_is_subtracted_but_never_more_than_half(mismatch, expected):
    """Catches a budget that a negative mismatch raises, and one that a large mismatch turns to zero."""
    assert TrustRegion(kl_budget=2e-4).budget_at(0, mismatch) == pytest.approx(expected, rel=1e-12)
    assert TrustRegion(kl_budget=2e-4, mismatch_correction=False).budget_at(0, mismatch) == 2e-4


@pytest.mark.parametrize("mismatch", [float("nan"), float("inf")])
def test_refuses_a_mismatch_that_is_not_finite(mismatch):
    with pytest.raises(NonFiniteProbeError, match="mismatch"):
        TrustRegion().budget_at(0, mismatch)


@pytest.mark.parametrize("method", ["tangent", "difference"])
@pytest.mark.parametrize(
    ("predicted", "alpha"), [(2e-4, 1.0), (8e-4, 0.5), (5e-5, 2.0), (1e-9, 3.0), (0.0, 3.0), (2.0, 0.01)]
)
def test_alpha_is_the_square_root_of_the_ratio_up_to_its_maximum(monkeypatch, method, predicted, alpha):
    """Catches budget / predicted without the root, and a missing cap."""
    name = "predicted_kl" if method == "tangent" else "difference_kl"
    monkeypatch.setattr(region_module, name, lambda *args: predicted)
    decision = TrustRegion(method=method).predict(nn.Identity(), None, ANY_DELTAS, step=0)
    assert decision.alpha == pytest.approx(alpha, rel=1e-12)
    assert (decision.predicted_kl, decision.budget) == (predicted, 2e-4)


def test_predict_uses_the_budget_of_the_step_less_the_mismatch(monkeypatch):
    monkeypatch.setattr(region_module, "predicted_kl", lambda *args: 1e-4)
    region = TrustRegion(kl_budget=2e-4, kl_budget_final=1e-4, schedule_steps=10)
    decision = region.predict(nn.Identity(), None, ANY_DELTAS, step=10, mismatch=3e-5)
    assert decision.budget == pytest.approx(7e-5, rel=1e-9)
    assert decision.alpha == pytest.approx(math.sqrt(0.7), rel=1e-9)


def test_predict_refuses_no_deltas():
    with pytest.raises(ProbeError, match="deltas is empty"):
        TrustRegion().predict(nn.Identity(), None, {}, step=0)


@pytest.mark.parametrize(
    ("policy", "realised", "attempt", "action"),
    [
        ("shrink", 2.9e-4, 0, "accept"),
        ("shrink", 3.1e-4, 0, "shrink"),
        ("shrink", 3.1e-4, 1, "shrink"),
        ("shrink", 3.1e-4, 2, "reject"),
        ("reject", 2.9e-4, 0, "accept"),
        ("reject", 3.1e-4, 0, "reject"),
        ("warn", 3.1e-4, 0, "accept"),
    ],
)
def test_verdicts(monkeypatch, caplog, policy, realised, attempt, action):
    """Budget 2e-4, ratio 1.5, two shrinks. Catches an endless shrink loop and a violation that passes unseen."""
    monkeypatch.setattr(region_module, "realised_kl", lambda *args: realised)
    region = TrustRegion(on_violation=policy, max_shrinks=2)
    verdict = region.verify(nn.Identity(), None, ANY_DELTAS, budget=2e-4, attempt=attempt)
    assert (verdict.action, verdict.realised_kl) == (action, realised)
    expected = 0.95 * math.sqrt(2e-4 / realised) if action == "shrink" else 1.0
    assert verdict.factor == pytest.approx(expected, rel=1e-12)
    assert ("exceeds" in caplog.text) == (policy == "warn")


def test_mismatch_average():
    """Catches weights swapped (0.3 belongs to the new batch), prompt tokens counted, and a negative result."""
    mask = torch.tensor([[0, 1, 1]])
    trainer = torch.tensor([[0.0, -1.0, -2.0]])
    rollout = torch.tensor([[9.0, -0.9, -1.8]])  # mean difference over the generated tokens: 0.15
    assert update_mismatch(None, rollout, trainer, mask) == pytest.approx(0.15, rel=1e-5)
    assert update_mismatch(0.05, rollout, trainer, mask) == pytest.approx(0.7 * 0.05 + 0.3 * 0.15, rel=1e-5)
    assert update_mismatch(0.01, trainer, rollout, mask) == 0.0
    assert update_mismatch(0.05, rollout, trainer, mask, weight=1.0) == pytest.approx(0.15, rel=1e-5)


def test_mismatch_refuses_bad_tensors():
    ones = torch.ones(1, 2)
    with pytest.raises(ProbeError, match="one shape"):
        update_mismatch(None, ones, torch.ones(1, 3), ones)
    with pytest.raises(ProbeError, match="no 1"):
        update_mismatch(None, ones, ones, torch.zeros(1, 2))
    with pytest.raises(NonFiniteProbeError, match="rollout_logps"):
        update_mismatch(0.1, ones * float("-inf"), ones, ones)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kl_budget", 0.0),
        ("kl_budget", -1e-4),
        ("kl_budget", float("nan")),
        ("kl_budget", "2e-4"),
        ("kl_budget", None),
        ("kl_budget_final", 0.0),
        ("kl_budget_final", float("inf")),
        ("alpha_max", 0),
        ("alpha_max", True),
        ("schedule_steps", 0),
        ("schedule_steps", 300.0),
        ("mismatch_correction", 1),
        ("on_violation", "ignore"),
        ("violation_ratio", 0.9),
        ("violation_ratio", float("inf")),
        ("max_shrinks", -1),
        ("max_shrinks", True),
        ("max_shrinks", 21),
        ("method", "exact"),
        ("min_responses", 0),
        ("min_tokens", 0),
        ("max_response_tokens", 0),
        ("seed", -1),
    ],
)
def test_refuses_bad_settings(field, value):
    with pytest.raises(ConfigError, match=rf"^{field}=") as caught:
        TrustRegion(**{field: value})
    assert repr(value) in str(caught.value)
    assert "allowed" in str(caught.value)


def test_is_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        TrustRegion().kl_budget = 1.0
    with pytest.raises(TypeError):
        TrustRegion(1e-4)


def test_import_does_not_import_transformers():
    code = "import sys, logra.trust; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
