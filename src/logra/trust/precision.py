"""Runs a forward in fp32 whatever the dtype of the weights.

A trust region's budget is of the order of 1e-4 nats: a logit moves by about 0.01. bfloat16 logits have a spacing of
0.06 to 0.125 there, and an output of a layer that moves by less than half a spacing does not move at all, so the KL
between two bfloat16 forwards is rounding noise of 1e-4 to 1e-3 nats. Differences of two forwards (`verify`, and
`method="difference"`) are therefore taken in fp32: every operation gets its bfloat16 or float16 operands cast up, and
autocast is off. A linear map casts its weight a block of rows at a time: the extra memory is `BLOCK_BYTES`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from logra.shards import is_sharded

LOW_PRECISION = (torch.bfloat16, torch.float16)
BLOCK_BYTES = 2**26
"""Of the fp32 copy of a weight that is multiplied with (64 MiB)."""
_GET_DTYPE = torch.Tensor.dtype.__get__  # pyright: ignore[reportAttributeAccessIssue]


class Float32Forward(TorchFunctionMode):
    """Context manager: bfloat16 and float16 tensors enter every torch operation as fp32. Wider ones are untouched.

    Args:
        device_type: of the tensors, whose autocast is switched off.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operation with its low-precision operands cast to fp32."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == _GET_DTYPE:
            # Model code casts to `weight.dtype`: that must not bring bfloat16 back.
            dtype = func(*args)
            return torch.float32 if dtype in LOW_PRECISION else dtype
        if name == "__get__" or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            # Attributes cost no cast, and an in-place operation must reach the tensor itself, not a copy.
            return func(*args, **kwargs)
        if func is torch.nn.functional.embedding:
            # Cast the rows that were looked up, not the table.
            return _up(func(*args, **kwargs))
        with torch.autocast(self.device_type, enabled=False):
            if func is torch.nn.functional.linear and _is_large(*args, **kwargs):
                return _linear_by_blocks(*args, **kwargs)
            return func(*tree_map(_up, args), **tree_map(_up, kwargs))


def _is_large(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the fp32 copy of a low-precision weight would be larger than a block."""
    return _GET_DTYPE(weight) in LOW_PRECISION and 4 * weight.numel() > BLOCK_BYTES and not is_sharded(weight)


def _linear_by_blocks(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input Wᵀ + bias, fp32 [..., out], from one block of rows of W after the other."""
    input, num_rows = _up(input), max(BLOCK_BYTES // (4 * weight.shape[1]), 1)
    output = input.new_empty(*input.shape[:-1], weight.shape[0])
    for start in range(0, weight.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        output[..., rows] = torch.nn.functional.linear(
            input, weight[rows].float(), None if bias is None else bias[rows].float()
        )
    return output


def _up(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value
