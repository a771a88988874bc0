"""Linear layers under forward-mode AD at the price of two products.

PyTorch's own rule also forms the product with the tangent of the weight, which is zero here, and copies the weight on
the way: 1.5 times the time of a probe. For `y = x Wᵀ + b` with constant W and b, the tangent is simply `dx Wᵀ`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class LinearTangent(TorchFunctionMode):
    """Context manager: `F.linear` of a dual input with a constant weight takes the two products that it needs.

    A weight or bias that carries a tangent of its own goes PyTorch's way.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operation."""
        kwargs = kwargs or {}
        if func is not F.linear or kwargs or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        x, *constants = args
        primal, tangent = forward_ad.unpack_dual(x)
        if tangent is None or any(_has_tangent(constant) for constant in constants):
            return func(*args)
        return forward_ad.make_dual(F.linear(primal, *constants), F.linear(tangent, constants[0]))


def _has_tangent(value: Tensor | None) -> bool:
    return value is not None and forward_ad.unpack_dual(value).tangent is not None
