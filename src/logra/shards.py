"""Where one process stands in a weight that several processes share: FSDP2, HSDP and DTensor tensor parallelism.

Two rectangles of the canonical weight [out, in] belong to a process:

    held    what its parameter stores between steps: rows under FSDP2 (possibly none), all of it under replication
    used    what its module multiplies with in forward and backward: all of the weight under FSDP2, which gathers it, and
            a block of rows (column-wise) or of columns (row-wise) under tensor parallelism

The gradient of a weight is the mean over data-parallel replicas of what the used rectangles contribute. Everything here
is read off the DTensor that is the parameter; the private names of torch that it takes are in `_fsdp_specs`
and `uncast_activations`.

Refuses (TargetError): partial sums, weights that a tensor-parallel mesh replicates, and CPU offload.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logra.errors import TargetError
from logra.hashing import Range


@dataclass(frozen=True)
class Rectangle:
    """Half-open ranges of rows (out features) and columns (in features) of a canonical weight."""

    rows: Range
    columns: Range

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns); either may be 0."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Sharding:
    """One process's share of one weight.

    Attributes:
        held: what the parameter stores here.
        used: what the module multiplies with here.
        num_holders: processes that store disjoint parts of the weight; every part has world size / num_holders copies.
        num_users: processes whose used rectangles make up the weight; world size / num_users replicas work on other data.
    """

    held: Rectangle
    used: Rectangle
    num_holders: int = 1
    num_users: int = 1

    @staticmethod
    def whole(num_out: int, num_in: int) -> "Sharding":
        """That of a weight which every process has in full."""
        everything = Rectangle((0, num_out), (0, num_in))
        return Sharding(everything, everything)


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return hasattr(parameter, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this process stores of a tensor, detached; the tensor itself where it is no DTensor. A view in either case."""
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached


def whole(tensor: Tensor) -> Tensor:
    """The full tensor. For a DTensor a collective of its mesh, and the result lies on the CPU."""
    if not is_sharded(tensor):
        return tensor
    detached: Any = tensor.detach()
    return detached.full_tensor().cpu()


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put the sharded parameters back in their modules, and forget gathered copies of weights about to change.

    The root of an FSDP2 model keeps what it gathered after a forward without backward (generation, a probe).
    """
    with torch._C.DisableTorchFunction():  # a mode that casts would let it free copies
        for module in _fsdp_modules(model):
            module.reshard()


def gathered_again(output: Tensor, model: nn.Module) -> None:
    """Let FSDP2 gather groups of several modules for the backward of `output`, if they are gathered now, after its forward.

    FSDP2 gathers a group when a gradient reaches an output of the whole model, and frees it when the gradient has passed one
    of its modules. Of a final norm in the group of a head that is called again, that is too early.
    """
    kept = [
        module
        for module in _fsdp_modules(model)
        for group in module._get_fsdp_state()._fsdp_param_groups
        if group.is_unsharded and len(group.modules) > 1
    ]

    def gather(_: Tensor) -> None:
        for module in kept:
            module.unshard()

    if kept and output.requires_grad:
        output.register_hook(gather)


def is_fsdp(model: nn.Module) -> bool:
    """Whether some module of the model is managed by FSDP2, so that a forward of it is a collective."""
    return next(_fsdp_modules(model), None) is not None


@contextmanager
def uncast_activations(model: nn.Module) -> Iterator[None]:
    """Inside, FSDP2 gathers weights in the dtype that it always does, and leaves activations as they are.

    Its hooks then run outside of torch function modes too: one that changes dtypes would change what is gathered.
    """
    undo: list[Callable[[], None]] = []
    seen: set[int] = set()
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        if id(state) not in seen:  # modules of one group share it
            seen.add(id(state))
            undo.append(partial(setattr, state, "_mp_policy", state._mp_policy))
            state._mp_policy = replace(state._mp_policy, cast_forward_inputs=False, output_dtype=None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    undo.append(partial(hooks.__setitem__, key, hook))
                    hooks[key] = partial(_outside_modes, hook)
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _outside_modes(hook: Callable[..., Any], *args: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return hook(*args)


def shardings(model: nn.Module, parameters: dict[str, tuple[nn.Parameter, bool]]) -> dict[str, Sharding]:
    """This process's share of weights.

    Args:
        model: the model that owns them, resharded.
        parameters: fully qualified name -> parameter, and whether the module stores its transpose.

    Raises:
        TargetError: see the module docstring.
    """
    specs = _fsdp_specs(model)
    result = {}
    for fqn, (parameter, transposed) in parameters.items():
        if not is_sharded(parameter):
            num_out, num_in = parameter.shape[::-1] if transposed else parameter.shape
            result[fqn] = Sharding.whole(num_out, num_in)
            continue
        dtensor: Any = parameter
        if dtensor.to_local().device.type != dtensor.device_mesh.device_type:
            raise TargetError(
                f"target {fqn!r} is sharded over {dtensor.device_mesh.device_type} and stored on "
                f"{dtensor.to_local().device}: CPU offload is not supported. Call fully_shard without offload_policy."
            )
        held, num_holders = _rectangle(fqn, dtensor._spec, transposed)
        if id(parameter) not in specs:  # tensor parallelism alone
            used, num_users = held, num_holders
        elif specs[id(parameter)] is None:  # FSDP2 alone
            used, num_users = Sharding.whole(*_canonical(tuple(parameter.shape), transposed)).used, 1
        else:
            used, num_users = _rectangle(fqn, specs[id(parameter)], transposed)
        _check_tensor_parallel(fqn, specs.get(id(parameter), dtensor._spec))
        result[fqn] = Sharding(held, used, num_holders, num_users)
    return result


def _rectangle(fqn: str, spec: Any, transposed: bool) -> tuple[Rectangle, int]:
    """The part of a weight that a DTensor spec gives this process, and how many processes have other parts."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    num_parts = 1
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if placement.is_partial():
            raise TargetError(f"target {fqn!r} is a partial sum ({spec.placements}): only shards can be trained")
        num_parts *= 1 if placement.is_replicate() else size
    sizes, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    ranges = [(offset, offset + size) if size else (0, 0) for offset, size in zip(offsets, sizes, strict=True)]
    rows, columns = _canonical(tuple(ranges), transposed)
    return Rectangle(rows, columns), num_parts


def _canonical(pair: tuple[Any, ...], transposed: bool) -> tuple[Any, Any]:
    first, second = pair
    return (second, first) if transposed else (first, second)


def _check_tensor_parallel(fqn: str, tensor_parallel: Any) -> None:
    if tensor_parallel is None:
        return
    if tensor_parallel.mesh.ndim > 1:
        raise TargetError(
            f"target {fqn!r} is distributed over {tensor_parallel.mesh.ndim} mesh dimensions besides those of FSDP2; "
            f"allowed is one, of tensor parallelism"
        )
    if any(
        placement.is_replicate() and size > 1
        for size, placement in zip(tensor_parallel.mesh.shape, tensor_parallel.placements, strict=True)
    ):
        raise TargetError(
            f"target {fqn!r} is replicated over a tensor-parallel mesh ({tensor_parallel.placements}): whether its "
            f"gradients there are equal or parts of a sum is unknown. Shard it (ColwiseParallel, RowwiseParallel), leave it "
            f"a plain tensor, or leave it out of target_modules."
        )


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    # Not imported where nobody did: then there is no such module.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not dist.is_available():
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            yield module


def _fsdp_specs(model: nn.Module) -> dict[int, Any]:
    """id of a parameter that FSDP2 manages -> the tensor-parallel spec it has when gathered; None for a plain tensor."""
    return {
        id(managed.sharded_param): managed._unsharded_dtensor_spec
        for module in _fsdp_modules(model)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for managed in group.fsdp_params
    }
