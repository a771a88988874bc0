"""Forward-mode AD through operations with constants, at the price of what they need.

PyTorch's own rules treat a constant operand as one with a zero tangent: for a linear layer they form the product with the
zero tangent of its weight and copy the weight on the way, and for a product with a constant (norm weights, rotary
embeddings) they work out in Python which shape that zero would have. Together half of a probe's time. With constant W, b
and c the tangents are simply

    y = x Wᵀ + b:  dy = dx Wᵀ        y = x c:  dy = dx c        y = x + c:  dy = dx, broadcast
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from logra.trust.precision import LOW_PRECISION

_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


class ConstantTangent(TorchFunctionMode):
    """Context manager: linear layers, products and sums of a dual tensor with constants take these rules.

    Operands that carry tangents of their own, and every other operation, go PyTorch's way.

    Attributes:
        saw_low_precision: whether any result was float16 or bfloat16. Weights and settings do not tell: training libraries
            put autocast inside `model.forward`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saw_low_precision = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operation."""
        result = self._run(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.dtype in LOW_PRECISION:
            self.saw_low_precision = True
        return result

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or not (func is F.linear or (len(args) == 2 and (func in _PRODUCTS or func in _SUMS))):
            return func(*args, **kwargs)
        primals, tangents = zip(*map(_unpack, args), strict=True)
        dual = [index for index, tangent in enumerate(tangents) if tangent is not None]
        if len(dual) != 1 or (func is F.linear and dual != [0]):
            return func(*args)
        tangent = tangents[dual[0]]
        output = func(*primals)
        if func is F.linear:
            moved = F.linear(tangent, primals[1])
        elif func in _PRODUCTS:
            moved = tangent * primals[1 - dual[0]]
        else:
            moved = tangent.expand_as(output)
        return forward_ad.make_dual(output, moved.to(output.dtype))


def _unpack(value: Any) -> tuple[Any, Tensor | None]:
    return forward_ad.unpack_dual(value) if isinstance(value, Tensor) else (value, None)
