"""Capture: the backward pass of a target accumulates sketches where a dense weight gradient would have been formed.

With input X [t, in] and output gradient H [t, out] of one call of a target, G = Hᵀ X is its share of the gradient. The
capture adds, in fp32 and directly to the accumulators,

    S += Hᵀ (X diag(s) Aᵀ)     [out, r]     (sides "in" and both)
    T += (B Hᵀ) X              [l, in]      (side "out" and both)

and returns the gradient of X as usual. `weight.grad` stays None and G is never formed. The scales s are 1 unless input
scaling is on. Accumulation is linear, so micro-batches, repeated calls of one module and recomputation under activation
checkpointing need no further care: whatever runs backward once is added once.

Contract: projections stay fixed from `begin_window` to `collect`; a backward pass that straddles a `begin_window` is
refused. A forward without gradients (rollout, evaluation, probe) runs the plain linear map.
"""

import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logra.errors import CaptureError
from logra.sketch.targets import Target
from logra.update import SignFactor

_SLOT = "_logra_slot"


@dataclass(frozen=True, kw_only=True)
class SketchSpec:
    """Shape and seed of the sketches.

    Attributes:
        rank: r, number of rows of A (and of B for a target sketched on its out side alone).
        two_sided: keep S and T for every target, with l = 2 r; otherwise one of them, as `out_side` says.
        seed: seed of all projections.
        input_moments: accumulate the second moment of every input feature (for input scaling).
    """

    rank: int
    two_sided: bool
    seed: int
    input_moments: bool = False

    @property
    def rank_out(self) -> int:
        """l, number of rows of B: 2 r when both sides are kept (Tropp et al. 2017), else r."""
        return 2 * self.rank if self.two_sided else self.rank


@dataclass
class Sketch:
    """Accumulated sketches of one target; None where nothing ran backward or the side is not kept.

    Attributes:
        on_in: S = G diag(s) Aᵀ, fp32 [out, r].
        on_out: T = B G, fp32 [l, in].
    """

    on_in: Tensor | None = None
    on_out: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The sketches that exist."""
        return [tensor for tensor in (self.on_in, self.on_out) if tensor is not None]


class SharedInput:
    """What siblings with one parent and one input width share: A, the input scales, and X Aᵀ of the tensor they read."""

    def __init__(self, parent: str, in_features: int, spec: SketchSpec) -> None:
        self.parent = parent
        self.in_features = in_features
        self.spec = spec
        self.projection_index = 0
        self.exponents: Tensor | None = None
        """log2 of the input scales s, integers [in]; None means s = 1."""
        self.square_sum: Tensor | None = None
        """Sum over tokens of the squared inputs of this window, fp32 [in]."""
        self.num_tokens = 0
        self._source: weakref.ref[Tensor] | None = None
        self._version = -1
        self._dtype: torch.dtype | None = None
        self._cast: Tensor | None = None
        self._projected: Tensor | None = None

    def signs(self) -> SignFactor:
        """A of the current window."""
        return SignFactor(self.spec.seed, self.projection_index, self.parent, "in")

    def read(self, x: Tensor, dtype: torch.dtype, *, project: bool) -> tuple[Tensor, Tensor | None]:
        """X in the compute dtype and X diag(s) Aᵀ [t, r], computed once for all modules that read the tensor `x`."""
        fresh = self._source is None or self._source() is not x or self._version != x._version or self._dtype != dtype
        if fresh:
            # The reference dies with the tensor, and takes X Aᵀ along: nothing outlives the pass that needs it.
            self._source = weakref.ref(x, self._forget)
            self._version, self._dtype = x._version, dtype
            self._cast = None if x.dtype == dtype else x.to(dtype)
            self._projected = None
        cast = x if self._cast is None else self._cast
        if fresh and self.spec.input_moments:
            self._add_moments(cast)
        if project and self._projected is None:
            self._projected = self._project(cast)
        return cast, self._projected

    def _project(self, x: Tensor) -> Tensor:
        signs = self.signs().matrix(self.spec.rank, self.in_features, device=x.device)
        if self.exponents is not None:
            signs = torch.ldexp(signs, self.exponents)
        return x.detach().reshape(-1, self.in_features) @ signs.to(x.dtype).T

    def _add_moments(self, x: Tensor) -> None:
        squares = x.detach().reshape(-1, self.in_features).float().square().sum(dim=0)
        self.square_sum = squares if self.square_sum is None else self.square_sum.add_(squares)
        self.num_tokens += x.numel() // self.in_features

    def _forget(self, source: "weakref.ref[Tensor] | None" = None) -> None:
        if source is None or source is self._source:
            self._source = self._cast = self._projected = None

    def begin_window(self, projection_index: int) -> None:
        """Drop what the last window left, and use the projection `projection_index` from now on."""
        self._forget()
        self.projection_index = projection_index
        self.square_sum, self.num_tokens = None, 0


class _Slot:
    """What one target's patched forward needs. A copied or unpickled module gets None in its place: it is plain again."""

    def __init__(self, capture: "Capture", target: Target, shared: SharedInput, keep_in: bool, keep_out: bool) -> None:
        self.capture = capture
        self.target = target
        self.shared = shared
        self.keep_in = keep_in
        self.keep_out = keep_out
        self.sketch = Sketch()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def out_signs(self) -> SignFactor:
        """B of the current window."""
        return SignFactor(self.shared.spec.seed, self.shared.projection_index, self.target.parent, "out")

    def accumulate(self, x: Tensor | None, projected: Tensor | None, h: Tensor) -> None:
        """Add one backward pass: h [t, out], x [t, in] where T is kept, projected [t, r] where S is kept."""
        if projected is not None:
            self.sketch.on_in = _add_product(self.sketch.on_in, h.T, projected)
        if x is not None:
            # B is stored transposed here: matrix() of an out factor is Bᵀ [out, l].
            signs = self.out_signs().matrix(self.shared.spec.rank_out, self.target.out_features, device=h.device)
            self.sketch.on_out = _add_product(self.sketch.on_out, (h @ signs.to(h.dtype)).T, x)


class Capture:
    """Attaches to the targets of a model and accumulates their sketches.

    Args:
        model: the model; its embeddings' outputs are made to require a gradient, so that gradient flows (also through
            reentrant checkpointing) when every parameter below is frozen or sketched.
        targets: what `find_targets` returned.
        spec: rank, sides and seed.
        out_side: the targets whose single sketch is T = B G instead of S = G Aᵀ (one-sided only).
    """

    def __init__(
        self, model: nn.Module, targets: Sequence[Target], spec: SketchSpec, out_side: frozenset[str] = frozenset()
    ) -> None:
        self.spec = spec
        self.window = 0
        self._anchor = torch.zeros((), requires_grad=True)
        self._shared: dict[tuple[str, int], SharedInput] = {}
        self._slots: dict[str, _Slot] = {}
        for target in targets:
            if getattr(target.module, _SLOT, None) is not None:
                raise CaptureError(
                    f"target {target.fqn!r} already belongs to another SketchOptimizer: detach that one first"
                )
        for target in targets:
            key = (target.parent, target.in_features)
            if key not in self._shared:
                self._shared[key] = SharedInput(*key, spec)
            on_out = target.fqn in out_side
            slot = _Slot(self, target, self._shared[key], spec.two_sided or not on_out, spec.two_sided or on_out)
            self._slots[target.fqn] = slot
            setattr(target.module, _SLOT, slot)
            target.module.forward = types.MethodType(forward, target.module)
        self._hooks = [
            module.register_forward_hook(_anchor_output)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        ]

    def detach(self) -> None:
        """Give every target its own forward back."""
        for slot in self._slots.values():
            if slot.target.module.__dict__.pop(_SLOT, None) is not None:
                del slot.target.module.forward
        for hook in self._hooks:
            hook.remove()

    def begin_window(self, projection_index: int) -> None:
        """Clear all sketches and draw the projections with this index."""
        self.window += 1
        for shared in self._shared.values():
            shared.begin_window(projection_index)
        for slot in self._slots.values():
            slot.sketch = Sketch()

    def sketches(self) -> Mapping[str, Sketch]:
        """The accumulated sketches by fully qualified name. They are this window's own tensors, not copies."""
        return {fqn: slot.sketch for fqn, slot in self._slots.items()}

    def shared_inputs(self) -> Sequence[SharedInput]:
        """One entry for each (parent, input width) among the targets."""
        return tuple(self._shared.values())

    def shared_input(self, fqn: str) -> SharedInput:
        """The entry that the target `fqn` belongs to."""
        return self._slots[fqn].shared

    def out_signs(self, fqn: str) -> SignFactor:
        """B of the current window for the target `fqn`."""
        return self._slots[fqn].out_signs()


@torch.compiler.disable
def forward(self: nn.Module, x: Tensor) -> Tensor:
    """Forward of a target: the linear map, with sketches instead of a weight gradient when gradients are recorded."""
    # Named `forward` and bound to the module, so that copies and pickles of the module resolve to a forward of their own.
    slot: _Slot | None = self.__dict__.get(_SLOT)
    if slot is None or not torch.is_grad_enabled():
        return type(self).forward(self, x)
    weight, bias = slot.target.weight, self.bias
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)  # type: ignore[union-attr]
    with torch.autocast(x.device.type, enabled=False):
        cast, projected = slot.shared.read(x, dtype, project=slot.keep_in)
        return _SketchedLinear.apply(  # type: ignore[no-any-return]
            cast,
            weight,
            bias,
            projected if slot.keep_in else None,
            slot.capture._anchor,
            slot,
        )


class _SketchedLinear(torch.autograd.Function):
    """y = x Wᵀ + b; the backward pass accumulates sketches in place of the gradient of W."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, projected: Tensor | None, anchor: Tensor, slot: _Slot
    ) -> Tensor:
        # The anchor always requires a gradient, so that backward reaches a target whose input does not.
        ctx.slot, ctx.window = slot, slot.capture.window
        ctx.save_for_backward(x if slot.keep_out else None, weight if ctx.needs_input_grad[0] else None, projected)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        x, weight, projected = ctx.saved_tensors
        slot: _Slot = ctx.slot
        if ctx.window != slot.capture.window:
            raise CaptureError(
                f"target {slot.target.fqn!r}: backward() of a forward pass from before the last step() or zero_grad(). "
                f"The projections have changed since; run forward again."
            )
        h = grad_output.reshape(-1, grad_output.shape[-1])
        slot.accumulate(None if x is None else x.reshape(-1, x.shape[-1]), projected, h)
        grad_x = None if weight is None else grad_output @ weight
        grad_bias = h.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None, None


def _anchor_output(module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        return output.requires_grad_()
    return output


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, fp32; the products of half-precision inputs are summed and returned in fp32."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    if a.is_cuda:
        # A GEMM that returns bf16 would round the sketch at every micro-batch.
        product = torch.mm(a, b, out_dtype=torch.float32)
    else:
        product = a.float() @ b.float()
    return product if total is None else total.add_(product)
