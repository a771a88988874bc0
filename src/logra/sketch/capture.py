"""Capture: the backward pass of a target accumulates sketches where a dense weight gradient would have been formed.

With input X [t, in] and output gradient H [t, out] of one call of a target, G = Hᵀ X is its share of the gradient. The
capture adds, in fp32 and directly to the accumulators,

    S += Hᵀ (X diag(s) Aᵀ)     [out, r]     (sides "in" and both)
    T += (B Hᵀ) X              [l, in]      (side "out" and both)

and returns the gradient of X as usual. `weight.grad` stays None and G is never formed. The scales s are 1 unless input
scaling is on. Accumulation is linear, so micro-batches, repeated calls of one module and recomputation under activation
checkpointing need no further care: whatever runs backward once is added once.

Contract: projections stay fixed within a window; a backward pass of a forward from before they changed is refused, and so
is one after `take`, whose gradient would be lost. A forward without gradients (rollout, evaluation, probe) runs the plain
linear map.
"""

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from logra.errors import CaptureError
from logra.hashing import Range
from logra.shards import is_sharded
from logra.sketch.accumulate import SharedInput, SharedSigns, Sketch, SketchSpec, Slot
from logra.sketch.experts import Expert, route, routed_experts, unroute
from logra.sketch.targets import Target
from logra.update import SignFactor

_SLOT = "_logra_slot"


class Capture:
    """Attaches to the targets of a model and accumulates their sketches.

    Args:
        model: the model; its embeddings' outputs are made to require a gradient, so that gradient flows (also through
            reentrant checkpointing) when every parameter below is frozen or sketched.
        targets: what `find_targets` returned.
        spec: rank, sides and seed.
        out_side: the targets whose single sketch is T = B G instead of S = G Aᵀ (one-sided only).
        frozen: parameters that were frozen for the time of the capture; `detach` unfreezes them.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        spec: SketchSpec,
        out_side: frozenset[str] = frozenset(),
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        self.spec = spec
        self._projections = 0
        self._taken = False
        self._anchor = torch.zeros((), requires_grad=True)
        self.shared_signs = SharedSigns()
        self.detached = False
        self._model = model
        self._frozen = frozen
        self._shared: dict[tuple[str, int, Range], SharedInput] = {}
        self._slots: dict[str, Slot] = {}
        for target in targets:
            expert = target.module if isinstance(target.module, Expert) else None
            if getattr(target.module, _SLOT, None) is not None or (expert is not None and routed_experts(expert.owner)):
                raise CaptureError(
                    f"target {target.fqn!r} already belongs to another SketchOptimizer: call detach() on that one first, or "
                    f"logra.detach(model) if it is out of reach"
                )
        for target in targets:
            key = (target.parent, target.in_features, target.sharding.used.columns)
            if key not in self._shared:
                self._shared[key] = SharedInput(*key, spec)
            on_out = target.fqn in out_side
            slot = Slot(self, target, self._shared[key], spec.two_sided or not on_out, spec.two_sided or on_out)
            self._slots[target.fqn] = slot
            setattr(target.module, _SLOT, slot)
            target.module.forward = types.MethodType(forward, target.module)
        self._experts = [target.module for target in targets if isinstance(target.module, Expert)]
        route(self._experts)
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._hooks = [module.register_forward_hook(_AnchorHook(self._anchor)) for module in embeddings]
        # DistributedDataParallel would allocate buckets for gradients that never come.
        sketched = {id(target.stored) for target in targets}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in sketched]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)

    def detach(self) -> None:
        """Give every target its own forward back, and unfreeze what was frozen. Doing it twice changes nothing."""
        if self.detached:
            return
        self.detached = True
        for slot in self._slots.values():
            del slot.target.module.__dict__[_SLOT]
            del slot.target.module.forward
        unroute(self._experts)
        for hook in self._hooks:
            hook.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._model, [])

    def begin_window(self, projection_index: int) -> None:
        """Clear all sketches and use the projections with this index."""
        if any(shared.projection_index != projection_index for shared in self._shared.values()):
            self._projections += 1
        self.shared_signs.forget()
        for shared in self._shared.values():
            shared.begin_window(projection_index)
        for slot in self._slots.values():
            slot.begin_window()
        self._taken = False

    def _check_open(self, fqn: str, projections: int) -> None:
        if projections != self._projections:
            raise CaptureError(
                f"target {fqn!r}: backward() of a forward pass from before the last step(), which changed the "
                f"projections. Run forward again."
            )
        if self._taken:
            raise CaptureError(
                f"target {fqn!r}: backward() after the gradient of this step was recovered by clip_grad_norm_(), or by a "
                f"step() that ended in an error. Clip after the last backward(); repeat step(), or call zero_grad() first."
            )

    def take(self) -> dict[str, Sketch]:
        """Hand the accumulated sketches over, by fully qualified name; nothing may be added to this window any more."""
        self._taken = True
        self.shared_signs.forget()
        sketches = {}
        for fqn, slot in self._slots.items():
            sketches[fqn], slot.sketch = slot.sketch, Sketch()
        return sketches

    def sketches(self) -> Mapping[str, Sketch]:
        """The accumulated sketches by fully qualified name. They are this window's own tensors, not copies."""
        return {fqn: slot.sketch for fqn, slot in self._slots.items()}

    def whole(self, fqn: str, sketch: Sketch) -> Sketch:
        """A sketch of the target `fqn` as an addend of the whole weight's, zero where this process contributes nothing."""
        return self._slots[fqn].whole(sketch)

    def in_signs(self, fqn: str) -> SignFactor:
        """A of the current window for the target `fqn`."""
        return self._slots[fqn].shared.signs()

    def out_signs(self, fqn: str) -> SignFactor:
        """B of the current window for the target `fqn`."""
        return self._slots[fqn].out_signs()

    def single_signs(self, fqn: str) -> SignFactor | None:
        """The projection of the target's only sketch; None where both sides are sketched."""
        slot = self._slots[fqn]
        if slot.keep_in and slot.keep_out:
            return None
        return slot.shared.signs() if slot.keep_in else slot.out_signs()

    def exponents(self, fqn: str) -> Tensor | None:
        """log2 of the input scales s of the target `fqn`, integers [in]; None means s = 1."""
        return self._slots[fqn].exponents

    def set_exponents(self, fqn: str, exponents: Tensor) -> None:
        """Use these input scales from the next window on. Siblings with equal scales come to share X diag(s) Aᵀ."""
        own = self._slots[fqn]
        for slot in own.shared.slots:
            if slot.exponents is not None and torch.equal(slot.exponents, exponents):
                exponents = slot.exponents
                break
        own.exponents = exponents

    def input_moments(self, fqn: str) -> tuple[Tensor, float] | None:
        """Addends of the window's sum over tokens of squared inputs, fp32 [in], and of their number; None without a token."""
        return self._slots[fqn].input_moments()


def detach(model: nn.Module) -> None:
    """Undo what a `SketchOptimizer` did to the forwards of a model, when that optimizer itself is out of reach."""
    modules = list(model.modules())
    for module in (*modules, *(expert for owner in modules for expert in routed_experts(owner))):
        slot: Slot | None = module.__dict__.get(_SLOT)
        if slot is not None:
            slot.capture.detach()


@torch.compiler.disable
def forward(self: nn.Module, input: Tensor | None = None, *, x: Tensor | None = None) -> Tensor:
    """Forward of a target: the linear map, with sketches instead of a weight gradient when gradients are recorded."""
    # Named `forward` and bound to the module, so that copies and pickles of the module resolve to a forward of their own.
    # nn.Linear calls its argument `input`, Conv1D calls it `x`.
    x = input if x is None else x
    slot: Slot | None = self.__dict__.get(_SLOT)
    if slot is None or not torch.is_grad_enabled() or not slot.parameter.requires_grad:
        return type(self).forward(self, x)
    _check_weight(self, slot)
    assert x is not None
    module: Any = self
    if is_sharded(module.weight):
        return _tensor_parallel(module, slot, x)
    weight = module.weight.detach()
    return _linear(slot, x, weight.T if slot.target.transposed else weight, module.bias)


def _check_weight(module: Any, slot: Slot) -> None:
    """Refuse a weight that is neither the optimizer's parameter nor what FSDP2 has gathered of it."""
    weight = module.weight
    gathered = is_sharded(slot.parameter) and isinstance(weight, nn.Parameter) and weight.shape == slot.parameter.shape
    if weight is not slot.parameter and not gathered:
        raise CaptureError(
            f"target {slot.target.fqn!r}: its weight is not the parameter that the optimizer was built on (functional_call, "
            f"load_state_dict(assign=True), or a parameter that was replaced). Build the optimizer after loading."
        )


def _linear(slot: Slot, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear map of plain tensors with the capture behind it: x [..., columns], weight [rows, columns], bias [rows]."""
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        bias = None if bias is None else bias.to(dtype)
    elif weight.dtype != dtype:
        return F.linear(x, weight, bias)  # raises: what torch refuses is not cast in silence
    with torch.autocast(x.device.type, enabled=False):
        cast, projected = slot.read(x, dtype)
        return _SketchedLinear.apply(cast, weight, bias, projected, slot.capture._anchor, slot)  # type: ignore[no-any-return]


def _tensor_parallel(module: Any, slot: Slot, x: Any) -> Tensor:
    """The linear map of DTensors on this process's block of the weight, as torch's column- and row-wise styles call it.

    Column-wise, X is the same on all processes and the gradients of X add up; row-wise, the outputs do.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    target, mesh = slot.target, module.weight.device_mesh
    columns = target.sharding.used.columns
    if not isinstance(x, DTensor):
        return type(module).forward(module, x)  # raises: torch multiplies no plain tensor with a DTensor
    weight, bias = module.weight.detach().to_local(), module.bias
    weight = weight.T if target.transposed else weight
    last = x.ndim - 1
    if columns == (0, target.in_features):
        block = x.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        output = _linear(slot, block, weight, None if bias is None else bias.to_local())
        placement = Shard(last)
    else:
        if bias is not None and bias.requires_grad:
            raise CaptureError(
                f"target {target.fqn!r} is split row-wise and trains its bias, which is not supported: use "
                f"non_target='freeze', or freeze the bias"
            )
        block = x.redistribute(mesh, [Shard(last)]).to_local()
        # The outputs are summed: only one process may add the bias.
        output = _linear(slot, block, weight, bias.to_local() if bias is not None and columns[0] == 0 else None)
        placement = Partial()
    shape = torch.Size((*x.shape[:-1], target.out_features))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(output, mesh, [placement], run_check=False, shape=shape, stride=strides)


class _SketchedLinear(torch.autograd.Function):
    """y = x Wᵀ + b; the backward pass accumulates sketches in place of the gradient of W."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, projected: Tensor | None, anchor: Tensor, slot: Slot
    ) -> Tensor:
        # The anchor always requires a gradient, so that backward reaches a target whose input does not.
        ctx.slot, ctx.projections = slot, slot.capture._projections
        # The weight as it is, not its cast: a copy would live until backward, where FSDP2 has long freed the weight.
        ctx.save_for_backward(x if slot.keep_out else None, weight if ctx.needs_input_grad[0] else None, projected)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        x, weight, projected = ctx.saved_tensors
        slot: Slot = ctx.slot
        slot.capture._check_open(slot.target.fqn, ctx.projections)
        h = grad_output.reshape(-1, grad_output.shape[-1])
        slot.accumulate(None if x is None else x.reshape(-1, x.shape[-1]), projected, h)
        grad_x = None if weight is None else grad_output @ weight.to(grad_output.dtype)
        grad_bias = h.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None, None


class _AnchorHook:
    """Forward hook of an embedding: its output requires a gradient. A copied or unpickled module gets one that is inert."""

    def __init__(self, anchor: Tensor) -> None:
        self._anchor = anchor

    def __call__(self, module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor | None:
        if torch.is_grad_enabled() and not output.requires_grad:
            return _anchored(output, self._anchor)
        return None

    def __reduce__(self) -> tuple[type["_InertHook"], tuple[()]]:
        return _InertHook, ()


class _InertHook:
    """What stands for an `_AnchorHook` in a copy of the model."""

    def __call__(self, module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
        return None


class _Anchored(torch.autograd.Function):
    """The input as a tensor that requires a gradient, and is no leaf: models may change it in place."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return None, None


_anchored: Any = torch.compiler.disable(_Anchored.apply)
