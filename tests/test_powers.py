"""Multiplication with powers of two is exact."""

import pytest
import torch

from logra.powers import scale_by_powers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("integers", [torch.int16, torch.int32, torch.int64])
def test_it_is_exact(dtype, integers):
    torch.manual_seed(0)
    x = torch.randn(5, 41, dtype=dtype)
    exponents = torch.arange(-20, 21, dtype=integers)
    expected = x.double() * torch.tensor([2.0**e for e in range(-20, 21)], dtype=torch.float64)
    for given, powers, product in ((x, exponents, expected), (x.T, exponents[:, None], expected.T)):
        found = scale_by_powers(given, powers)
        assert found.dtype == dtype
        assert torch.equal(found.double(), product)
