"""Numbers of one layer in weight space against matrices whose answers are known."""

import math

import pytest
import torch

from logra.contracts import Delta
from logra.diagnostics.weight_space import numerical_ranks, outside_energy, report


def with_singular_values(values, out=30, width=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(out, len(values), generator=generator))
    v, _ = torch.linalg.qr(torch.randn(width, len(values), generator=generator))
    return u, torch.tensor(values), v.T


def test_truncated_gradient():
    """The estimate is the best rank-2 part of G: every number follows from the singular values."""
    u, s, vt = with_singular_values([4.0, 3.0, 2.0, 1.0])
    gradient = (u * s) @ vt
    update = Delta(u[:, :1], -vt[:1])  # against the gradient's first direction, length 1
    found = report(gradient, Delta(u[:, :2] * s[:2], vt[:2]), update)
    total, kept = 30.0, 25.0
    assert found.gradient_cosine == pytest.approx(math.sqrt(kept / total), rel=1e-5)
    assert found.gradient_norm_ratio == pytest.approx(math.sqrt(kept / total), rel=1e-5)
    assert found.residual_energy == pytest.approx(1 - kept / total, rel=1e-4)
    assert found.outside_energy == pytest.approx(1 - kept / total, rel=1e-4)
    assert found.update_cosine == pytest.approx(-4 / math.sqrt(total), rel=1e-5)
    assert found.update_norm_ratio == pytest.approx(1 / math.sqrt(total), rel=1e-5)
    assert (found.rank, found.rank_99) == (4, 4)


def test_a_bad_core_is_in_the_residual_but_not_outside():
    """Singular values of one instead of G's: another estimate, in the same spaces."""
    u, s, vt = with_singular_values([4.0, 3.0])
    found = report((u * s) @ vt, Delta(u, vt), Delta(u, vt))
    assert found.residual_energy == pytest.approx((9 + 4) / 25, rel=1e-5)
    assert found.outside_energy == pytest.approx(0, abs=1e-10)
    assert found.gradient_cosine == pytest.approx(7 / math.sqrt(25 * 2), rel=1e-5)


def test_outside_counts_both_sides():
    u, s, vt = with_singular_values([2.0, 1.0])
    gradient = (u * s) @ vt
    # First column of G on the out side, second row space on the in side: nothing of G lies in both.
    assert outside_energy(gradient, Delta(u[:, :1], vt[1:])) == pytest.approx(1, rel=1e-5)
    assert outside_energy(gradient, Delta(u[:, :1], vt)) == pytest.approx(1 / 5, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0], (1, 1)), ([1.0, 1e-3], (2, 1)), ([1.0, 1e-9], (1, 1)), ([1.0] * 10, (10, 10)), ([10.0, 1.0, 0.5], (3, 2))],
)
def test_numerical_ranks(values, expected):
    """[10, 1, 0.5]: the first holds 98.8 % of the energy, the first two 99.75 %."""
    u, s, vt = with_singular_values(values)
    assert numerical_ranks((u * s) @ vt) == expected


def test_an_update_of_zero_has_no_direction():
    u, s, vt = with_singular_values([1.0])
    zero = Delta(torch.zeros(30, 1), torch.zeros(1, 20))
    found = report((u * s) @ vt, Delta(u, vt), zero)
    assert (found.update_cosine, found.update_norm_ratio) == (0.0, 0.0)
