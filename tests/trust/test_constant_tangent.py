"""The rules of `ConstantTangent` against PyTorch's own."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from logra.trust.constant_tangent import ConstantTangent
from logra.trust.measure import _load_forward_derivatives

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
D = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WEIGHT = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
BIAS = torch.randn(5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
WIDE = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
ROW = torch.randn(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

OPERATIONS = {
    "linear": lambda x: F.linear(x, WEIGHT),
    "linear with bias": lambda x: F.linear(x, WEIGHT, BIAS),
    "times a row": lambda x: x * ROW,
    "row times": lambda x: ROW * x,
    "times a wider tensor": lambda x: torch.mul(WIDE, x),
    "times a number": lambda x: x * 3.0,
    "number times": lambda x: 3 * x,
    "plus a wider tensor": lambda x: x + WIDE,
    "wider tensor plus": lambda x: torch.add(WIDE, x),
    "plus a number": lambda x: 1 + x,
    "minus": lambda x: ROW - x,
    "two duals": lambda x: x * x + x,
    "weight that moves": lambda x: F.linear(WIDE, x),
    "scaled sum": lambda x: torch.add(x, ROW, alpha=2),
    "in place": lambda x: (x * 1).mul_(ROW),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_tangents_are_those_of_pytorch(name):
    """Catches a missing broadcast, a bias that enters the tangent, and operands in the other order."""
    _load_forward_derivatives()
    operation = OPERATIONS[name]
    with torch.no_grad(), forward_ad.dual_level():
        expected = forward_ad.unpack_dual(operation(forward_ad.make_dual(X, D)))
        with ConstantTangent():
            found = forward_ad.unpack_dual(operation(forward_ad.make_dual(X, D)))
    torch.testing.assert_close(found.primal, expected.primal, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.tangent, expected.tangent, rtol=1e-12, atol=1e-14)


def test_low_precision_is_noticed():
    with torch.no_grad():
        with ConstantTangent() as rules:
            X.float() @ D.float().T
        assert not rules.saw_low_precision
        with ConstantTangent() as rules:
            (X.bfloat16() @ D.bfloat16().T).float()
        assert rules.saw_low_precision
