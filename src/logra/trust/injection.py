"""Puts a proposed weight change into a forward without touching a weight.

For W <- decay * W - out_factor @ in_factor the output of the module on the input x moves by

    displacement = - out_factor (in_factor x) - (1 - decay) (out - bias),

two thin products. `Injection` adds it with ordinary forward hooks, either to the output itself (`mode="value"`: the
forward of the changed model) or to the output's forward-mode tangent (`mode="tangent"`: the first-order response of
everything behind it, on top of the tangent that arrives from earlier targets). dW [out, in] is never formed.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from logra.contracts import Delta
from logra.errors import ProbeError
from logra.hashing import Range
from logra.shards import is_sharded
from logra.sketch.experts import Expert


def displacement(module: nn.Module, delta: Delta, x: Tensor, output: Tensor) -> Tensor:
    """How the module's output moves, to all orders (a linear module's output is linear in its weight).

    Args:
        module: the target; its `bias`, if any, is not decayed.
        delta: the change of its weight.
        x: [..., in], the module's input.
        output: [..., out], what the module returned.

    Returns:
        [..., out] in the dtype of `output`.
    """
    moved = -delta.subtracted_output(x).to(output.dtype)
    if delta.decay != 1.0:
        bias = getattr(module, "bias", None)
        product = output if bias is None else output - bias.to(output.dtype)
        moved = moved - (1.0 - delta.decay) * product
    return moved


def _displacement_of_shards(module: nn.Module, delta: Delta, x: Any, output: Any) -> Tensor:
    """The same for DTensors of tensor parallelism: of the rows that this process has, or its addend of their sum."""
    from torch.distributed.tensor import DTensor

    if delta.decay != 1.0 and getattr(module, "bias", None) is not None:
        raise ProbeError("weight_decay on a tensor-parallel target with a bias cannot be priced: set weight_decay=0.")
    rows, columns = _last_range(output), _last_range(x)
    own = Delta(delta.out_factor[slice(*rows)], delta.in_factor[:, slice(*columns)], delta.decay)
    moved = displacement(module, own, x.to_local(), output.to_local())
    return DTensor.from_local(
        moved, output.device_mesh, output.placements, run_check=False, shape=output.shape, stride=output.stride()
    )


def _last_range(tensor: Any) -> Range:
    """The part of a DTensor's last dimension that this process holds."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    return offsets[-1], offsets[-1] + sizes[-1]


class Injection:
    """Context manager that injects `deltas` into every forward inside it. May be entered again and again.

    Args:
        deltas: target module -> change of its weight. Modules must return one tensor [..., out].
        mode: "value" or "tangent" (inside a `forward_ad.dual_level`).
    """

    def __init__(self, deltas: Mapping[nn.Module, Delta], mode: Literal["value", "tangent"]) -> None:
        self.deltas = deltas
        self.mode = mode
        self._reached: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Injection":
        # First in line: a later hook of the user then sees what it would see with changed weights.
        self._handles = [
            module.register_forward_hook(self._hook, prepend=True, with_kwargs=True) for module in self.deltas
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        self._reached.add(module)
        x = args[0] if args else next(iter(kwargs.values()))
        if is_sharded(output):
            if self.mode == "tangent":
                raise ProbeError(
                    "a tensor-parallel target has no forward derivative: use TrustRegion(method='difference')."
                )
            return output + _displacement_of_shards(module, self.deltas[module], x, output)
        if self.mode == "value":
            return output + displacement(module, self.deltas[module], x, output)
        primal, arriving = forward_ad.unpack_dual(output)
        tangent = displacement(module, self.deltas[module], forward_ad.unpack_dual(x).primal, primal)
        return forward_ad.make_dual(primal, tangent if arriving is None else arriving + tangent)

    def check_reached(self) -> None:
        """Raise ProbeError if no target ran inside the context; warn if some did not (their part is priced at zero)."""
        missing = len(self.deltas) - len(self._reached)
        if missing and missing == len(self.deltas):
            raise ProbeError(
                "no target module ran in the probe's forward: is it the model whose modules are the targets?"
            )
        # An expert that no token of the probe was sent to moves nothing there.
        unexpected = [m for m in self.deltas if m not in self._reached and not isinstance(m, Expert)]
        if unexpected:
            warnings.warn(
                f"{len(unexpected)} of {len(self.deltas)} target modules did not run in the probe's forward; "
                "what their updates do is not part of the KL.",
                stacklevel=3,
            )
