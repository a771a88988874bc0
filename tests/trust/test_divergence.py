"""Formulas against float64 numpy, where fp32 shortcuts would fail."""

import numpy as np
import pytest
import torch

from logra.trust.divergence import exact_kl, half_variance


def logits(seed: int, *, scale: float = 3.0, vocab: int = 200) -> torch.Tensor:
    return torch.randn(5, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def numpy_log_softmax(z: torch.Tensor, temperature: float) -> np.ndarray:
    values = z.double().numpy() / temperature
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def numpy_kl(z: torch.Tensor, new: torch.Tensor, temperature: float) -> np.ndarray:
    log_p, log_q = numpy_log_softmax(z, temperature), numpy_log_softmax(new, temperature)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_half_variance_is_the_formula(temperature):
    """Catches a temperature applied once, or to only one of logits and tangent."""
    z, d = logits(0), logits(1)
    p = np.exp(numpy_log_softmax(z, temperature))
    moved = d.numpy() / temperature
    expected = 0.5 * ((p * moved**2).sum(-1) - (p * moved).sum(-1) ** 2)
    torch.testing.assert_close(half_variance(z, d, temperature), torch.from_numpy(expected), rtol=1e-12, atol=0)


def test_half_variance_ignores_a_common_drift_in_fp32():
    """Catches the one-pass E[d^2] - E[d]^2: with a drift of 1e3 its rounding error, 0.1, would swamp a KL of 5e-5."""
    z, d = logits(0).float(), logits(1, scale=0.01).float()
    expected = half_variance(z.double(), d.double(), 1.0)
    # d itself is rounded to 6e-5 (ulp of 1e3) by the addition, 0.6 % of its spread.
    torch.testing.assert_close(half_variance(z, d + 1000, 1.0).double(), expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("step", [1e-1, 1.0, 10.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_exact_kl_of_large_steps_is_the_formula(step, temperature):
    """Catches a second-order shortcut, and KL(p' || p) in place of KL(p || p')."""
    z = logits(0)
    new = z + logits(1, scale=step)
    expected = torch.from_numpy(numpy_kl(z, new, temperature))
    torch.testing.assert_close(exact_kl(z, new, temperature), expected, rtol=1e-6, atol=0)


def test_exact_kl_keeps_its_digits_at_tiny_steps_in_fp32():
    """Catches -sum p (log p' - log p): at a KL of 5e-11 its fp32 rounding error is a thousand times the value."""
    z = logits(0).float()
    new = (z.double() + logits(1, scale=1e-5)).float()
    # The reference sees the fp32 logits, whose difference is exact in float64.
    moved = new.double() - z.double()
    expected = half_variance(z.double(), moved, 1.0)
    assert expected.max() < 1e-9
    torch.testing.assert_close(exact_kl(z, new, 1.0).double(), expected, rtol=1e-3, atol=0)
    naive = (z.softmax(-1) * (z.log_softmax(-1) - new.log_softmax(-1))).sum(-1).double()
    assert ((naive - expected).abs() > 0.5 * expected).any()


def test_exact_kl_does_not_overflow():
    """Catches exp(log p' - log p): a token of probability e^-300 that becomes certain gives inf, not 300 nats."""
    z = torch.zeros(1, 3)
    z[0, 0] = 300.0
    new = z.flip(-1)
    torch.testing.assert_close(exact_kl(z, new, 1.0), torch.tensor([300.0]), rtol=1e-5, atol=0)


def test_identical_logits_have_no_distance():
    z = logits(3).float()
    assert (exact_kl(z, z, 1.0) < 1e-12).all()
    assert (half_variance(z, torch.zeros_like(z), 1.0) == 0).all()
