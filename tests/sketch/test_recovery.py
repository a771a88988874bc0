"""Recovery from two sketches against the dense float64 reference."""

import pytest
import torch

from logra.sketch import reference
from logra.sketch.recovery import recover
from logra.update import SignFactor


def sketches(gradient, rank):
    out_features, in_features = gradient.shape
    a = SignFactor(1, 0, "m", "in").matrix(rank, in_features)
    b = SignFactor(1, 0, "m", "out").matrix(2 * rank, out_features)
    return reference.sketch_in(gradient, a).float(), reference.sketch_out(gradient, b).float(), b


def low_rank(out_features, in_features, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(out_features, rank, generator=generator, dtype=torch.float64)
    return left @ torch.randn(rank, in_features, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("out_features", "in_features", "true_rank"), [(48, 70, 5), (70, 48, 8), (33, 90, 1)])
def test_exact_when_the_gradient_has_at_most_the_sketch_rank(out_features, in_features, true_rank):
    gradient = low_rank(out_features, in_features, true_rank)
    q, r = recover(*sketches(gradient, 8))
    torch.testing.assert_close((q @ r).double(), gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())
    torch.testing.assert_close(q.T @ q, torch.eye(8), rtol=0, atol=1e-5)


def test_equals_the_pseudo_inverse_formula_for_a_full_rank_gradient():
    gradient = torch.randn(50, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    on_in, on_out, b = sketches(gradient, 12)
    q, r = recover(on_in, on_out, b)
    expected = reference.recover(on_in, on_out, b)
    torch.testing.assert_close((q @ r).double(), expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_a_zero_gradient_recovers_as_zero():
    q, r = recover(torch.zeros(20, 4), torch.zeros(8, 30), torch.ones(20, 8))
    assert torch.equal(q @ r, torch.zeros(20, 30))


def test_rank_above_the_number_of_rows():
    gradient = low_rank(6, 40, 6)
    q, r = recover(*sketches(gradient, 16))
    assert q.shape == (6, 6)
    torch.testing.assert_close((q @ r).double(), gradient, rtol=0, atol=1e-4 * gradient.abs().max().item())
