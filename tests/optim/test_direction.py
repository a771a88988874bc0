"""Directions from factors against the same formula on the dense float64 matrix."""

import pytest
import torch

from logra.optim import direction as d
from logra.optim.momentum import carry_over, truncated_sum
from logra.update import SignFactor


def factors(out_features=30, in_features=44, rank=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(out_features, rank, generator=generator))
    decay = torch.logspace(0, -2, rank)[:, None]
    return q, decay * torch.randn(rank, in_features, generator=generator)


def close(actual, expected, rtol=1e-4):
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=rtol * expected.abs().max().item())


def test_moments_are_means_of_squares_of_the_dense_matrix():
    q, r = factors()
    dense = q.double() @ r.double()
    close(d.row_moment_of_factors(q, r), dense.square().mean(1))
    close(d.column_moment_of_factors(q, r), dense.square().mean(0))
    close(d.row_moment(q), q.double().square().mean(1))


def test_spectral_of_factors_is_u_vt_of_the_dense_matrix():
    q, r = factors()
    u, _, vh = torch.linalg.svd(q.double() @ r.double(), full_matrices=False)
    out_factor, in_factor = d.spectral_of_factors(q, r)
    close(out_factor @ in_factor, u[:, :6] @ vh[:6])


def test_spectral_leaves_directions_below_the_numerical_rank_out():
    """Without the cut, rounding noise of an fp32 sketch would get the same length as the gradient."""
    q, r = factors()
    r[3:] = 1e-7 * r[3:]
    out_factor, in_factor = d.spectral_of_factors(q, r)
    assert torch.linalg.matrix_rank(out_factor @ in_factor) == 3
    assert (out_factor @ in_factor).norm() == pytest.approx(3**0.5, rel=1e-4)
    sketch = q @ torch.diag(torch.tensor([1.0, 0.5, 0.1, 1e-7, 0, 0]))
    assert d.spectral(sketch).norm() == pytest.approx(3**0.5, rel=1e-4)


def test_spectral_of_one_sketch():
    sketch = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(sketch.double(), full_matrices=False)
    close(d.spectral(sketch), u @ vh)
    assert torch.equal(d.spectral(torch.zeros(20, 5)), torch.zeros(20, 5))


def test_balanced_factors_keep_the_product_and_share_the_singular_values():
    q, r = factors()
    out_factor, in_factor = d.balanced(q, r)
    close(out_factor @ in_factor, q.double() @ r.double())
    close(out_factor.norm(dim=0), in_factor.norm(dim=1).double())


@pytest.mark.parametrize("num_updates", [1, 4])
def test_row_adam_formula(num_updates):
    q, _ = factors()
    moment = torch.rand(30, generator=torch.Generator().manual_seed(2))
    root = (moment.double() / (1 - 0.95**num_updates)).sqrt()
    expected = q.double() / (root + 1e-8 * root.mean())[:, None]
    close(d.row_adam(q, moment, num_updates), expected)


def test_row_adam_of_a_vanished_layer_is_zero_not_nan():
    assert torch.equal(d.row_adam(torch.zeros(4, 3), torch.zeros(4), 1), torch.zeros(4, 3))


def test_ema_with_bias_correction_reproduces_a_constant_moment():
    value, moment = torch.rand(5), None
    for _ in range(3):
        moment = d.ema(moment, value, d.BETA2)
    assert moment is not None
    close(moment / (1 - d.BETA2**3), value.double(), rtol=1e-6)


def test_restore_norm():
    q, _ = factors()
    sketch = 7 * q
    assert d.restore_norm(q * torch.rand(30, 1), sketch).norm() == pytest.approx(sketch.norm().item(), rel=1e-6)
    assert torch.equal(d.restore_norm(torch.zeros(3, 2), torch.ones(3, 2)), torch.zeros(3, 2))


def test_factored_scales_are_adafactors():
    q, r = factors()
    dense = q.double() @ r.double()
    row, column = dense.square().mean(1), dense.square().mean(0)
    row_scale, column_scale = d.factored_scales(
        0.05 * d.row_moment_of_factors(q, r), 0.05 * d.column_moment_of_factors(q, r), num_updates=1
    )
    expected = dense / (row[:, None] * column[None, :] / row.mean()).sqrt()
    close(row_scale[:, None] * (q @ r) * column_scale, expected)


def test_truncated_sum_is_the_best_rank_r_approximation():
    (q_m, r_m), (q, r) = factors(seed=0), factors(seed=1)
    u, sigma, vh = torch.linalg.svd(
        0.9 * q_m.double() @ r_m.double() + 0.1 * q.double() @ r.double(), full_matrices=False
    )
    out_factor, in_factor = truncated_sum(q_m, r_m, q, r, 0.9, 6)
    close(out_factor @ in_factor, (u[:, :6] * sigma[:6]) @ vh[:6])
    close(out_factor.T @ out_factor, torch.eye(6, dtype=torch.float64), rtol=1e-5)


def test_truncated_sum_of_matrices_with_fewer_rows_than_twice_the_rank():
    (q_m, r_m), (q, r) = factors(out_features=8, seed=0), factors(out_features=8, seed=1)
    out_factor, in_factor = truncated_sum(q_m, r_m, q, r, 0.5, 8)
    close(out_factor @ in_factor, 0.5 * q_m.double() @ r_m.double() + 0.5 * q.double() @ r.double())


def test_carried_momentum_is_the_new_sketch_of_the_smallest_consistent_gradient():
    """For many more columns than rank, A Aᵀ is nearly in·I and M A / in is nearly the pseudo-inverse solution."""
    rank, width = 8, 20_000
    old = SignFactor(0, 0, "m", "in").matrix(rank, width)
    new = SignFactor(0, 1, "m", "in").matrix(rank, width)
    momentum = torch.randn(5, rank, generator=torch.Generator().manual_seed(0))
    expected = momentum.double() @ torch.linalg.pinv(old.double().T) @ new.double().T
    # Off-diagonal entries of A Aᵀ / in are of size 1/sqrt(in) = 0.007.
    torch.testing.assert_close(carry_over(momentum, old, new).double(), expected, rtol=0, atol=0.01)
    torch.testing.assert_close(carry_over(momentum, old, old), momentum, rtol=0, atol=0.1)
