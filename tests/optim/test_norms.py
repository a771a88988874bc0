"""Norms in fp64 of what may not fit the squares of fp32."""

import pytest
import torch
from torch import nn

from logra.memory import Ledger
from logra.optim.norms import norm64


@pytest.mark.parametrize("shape", [(1000, 700), (3, 400_000), (2, 300, 1000), (0, 5), (5, 0), (7,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_it_is_the_root_of_the_sum_of_squares(shape, dtype, scale):
    """Several blocks, matrices and others, nothing at all; squares that underflow and overflow in fp32."""
    torch.manual_seed(0)
    matrix = (torch.randn(shape) * scale).to(dtype)
    expected = matrix.double().square().sum().sqrt()
    found = norm64(matrix)
    assert found.dtype == torch.float64 and found.shape == ()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    if matrix.ndim == 2:
        torch.testing.assert_close(norm64(matrix.T), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_shows(wrong):
    matrix = torch.ones(600, 1000)
    matrix[599, 999] = wrong
    assert not torch.isfinite(norm64(matrix))


def test_neither_a_large_weight_nor_an_empty_shard_of_one_is_copied():
    for shape in ((4000, 1000), (0, 2**26)):
        tensor = torch.zeros(shape)
        with Ledger(nn.Module()) as ledger:
            norm64(tensor)
            ledger.settle()
        of_block = 9 * 2**19  # its fp64 numbers, and scalars
        assert ledger.report().peak_bytes <= tensor.numel() * 4 + of_block
