"""Answers for a training step that asks fake tensors for their values.

A traced step has shapes and no numbers, but it does ask: is the norm finite, is it zero, how far may the step go? The
answers here are those of a step that goes well: comparisons hold, except for equality of elements, and every other number is
one. Whole tensors that are compared are equal: they are the input scales of modules that read one tensor.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_EQUALITIES = ("aten.eq.", "aten.isnan.", "aten.isinf.")


class StandIn(TorchDispatchMode):
    """Answers `.item()`, `bool()`, `.tolist()` and `torch.equal` of fake tensors. Enter it inside a `FakeTensorMode`."""

    def __init__(self) -> None:
        super().__init__()
        self._false: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if getattr(args[0], "constant", None) is not None:
                return func(*args)  # the fake mode knows the values of constants
            return self._answer(args[0])
        if func is torch.ops.aten.equal.default:
            return True
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.bool and str(func).startswith(_EQUALITIES):
            self._false.add(result.untyped_storage())
        return result

    def _answer(self, tensor: torch.Tensor) -> bool | int | float:
        if tensor.dtype == torch.bool:
            return tensor.untyped_storage() not in self._false
        return 1.0 if tensor.is_floating_point() else 1
