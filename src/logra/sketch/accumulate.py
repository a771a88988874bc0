"""What accumulates for one target: its sketches, its input moments, and what siblings share while they are computed."""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from logra.hashing import Range
from logra.powers import scale_by_powers
from logra.sketch.targets import Target
from logra.update import SignFactor

if TYPE_CHECKING:
    from logra.sketch.capture import Capture

_SQUARED_ROWS = 256
"""Rows of X whose squares exist at once."""


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
    """What siblings with one parent and one input width share: A, and X Aᵀ of a tensor that several of them read.

    Args:
        parent: names A.
        in_features: width of the whole weights.
        columns: the input features that are here; row-wise tensor parallelism has only some of them.
        spec: shape and seed of A.
    """

    def __init__(self, parent: str, in_features: int, columns: Range, spec: SketchSpec) -> None:
        self.parent = parent
        self.in_features = in_features
        self.columns = columns
        self.spec = spec
        self.projection_index = 0
        self._source: weakref.ref[Tensor] | None = None
        self._version = -1
        self._dtype: torch.dtype | None = None
        self._cast: Tensor | None = None
        self._projected: dict[int, Tensor] = {}
        self._squares: Tensor | None = None
        self.slots: list[Slot] = []

    def signs(self) -> SignFactor:
        """A of the current window."""
        return SignFactor(self.spec.seed, self.projection_index, self.parent, "in")

    def read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """X in the compute dtype, cast once for all modules that read the tensor `x`."""
        if self._source is None or self._source() is not x or self._version != x._version or self._dtype != dtype:
            self._forget()
            # The reference dies with the tensor, and takes X Aᵀ along: nothing outlives the pass that needs it.
            self._source = weakref.ref(x, self._forget)
            self._version, self._dtype = x._version, dtype
            self._cast = None if x.dtype == dtype else x.to(dtype)
        return x if self._cast is None else self._cast

    def project(self, x: Tensor, exponents: Tensor | None) -> Tensor:
        """X diag(s) Aᵀ [t, r] of what `read` returned, once for all modules with the same scales."""
        key = id(exponents)
        if key not in self._projected:
            signs = self.signs().matrix(self.spec.rank, self.in_features, columns=self.columns, device=x.device)
            if exponents is not None:
                signs = scale_by_powers(signs, exponents[slice(*self.columns)])
            self._projected[key] = x.detach().reshape(-1, x.shape[-1]) @ signs.to(x.dtype).T
        return self._projected[key]

    def squares(self, x: Tensor) -> Tensor:
        """Sum over tokens of X², fp32 [columns], of what `read` returned."""
        if self._squares is None:
            self._squares = _sum_of_squares(x.detach().reshape(-1, x.shape[-1]))
        return self._squares

    def _forget(self, source: "weakref.ref[Tensor] | None" = None) -> None:
        if source is None or source is self._source:
            self._source = self._cast = self._squares = None
            self._projected = {}

    def begin_window(self, projection_index: int) -> None:
        """Use the projection `projection_index` from now on."""
        self._forget()
        self.projection_index = projection_index


class SharedSigns:
    """The last Bᵀ that was asked for. Siblings of one width have the same, and their backward passes follow each other."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, ...], Tensor] | None = None

    def matrix(self, signs: SignFactor, rank: int, width: int, rows: Range, like: Tensor) -> Tensor:
        """The rows `rows` of Bᵀ [width, rank], on the device and in the dtype of `like`."""
        key = (signs, rank, width, rows, like.device, like.dtype)
        kept = self._kept  # read once: devices run backward in threads of their own
        if kept is None or kept[0] != key:
            self._kept = kept = None  # frees the old one before the new one exists
            kept = key, signs.matrix(rank, width, rows=rows, device=like.device).to(like.dtype)
            self._kept = kept
        return kept[1]

    def forget(self) -> None:
        """Free the signs."""
        self._kept = None


class Slot:
    """What one target's patched forward needs. A copied or unpickled module gets None in its place: it is plain again."""

    def __init__(self, capture: "Capture", target: Target, shared: SharedInput, keep_in: bool, keep_out: bool) -> None:
        self.capture = capture
        self.target = target
        self.parameter = target.parameter
        self.shared = shared
        self.keep_in = keep_in
        self.keep_out = keep_out
        self.sketch = Sketch()
        self.exponents: Tensor | None = None
        self.square_sum: Tensor | None = None
        self.num_tokens = 0
        shared.slots.append(self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def out_signs(self) -> SignFactor:
        """B of the current window."""
        return SignFactor(self.shared.spec.seed, self.shared.projection_index, self.target.parent, "out")

    def begin_window(self) -> None:
        """Drop what the last window left."""
        self.sketch, self.num_tokens = Sketch(), 0
        if self.square_sum is not None:
            self.square_sum.zero_()

    def read(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """X in the compute dtype, and X diag(s) Aᵀ where S is kept; counts the input moments if they are wanted."""
        cast = self.shared.read(x, dtype)
        if self.shared.spec.input_moments:
            squares = self.shared.squares(cast)
            if self.square_sum is None:
                self.square_sum = torch.zeros_like(squares)
            self.square_sum += squares  # a new tensor, among the activations, would keep the heap in pieces
            self.num_tokens += x.numel() // x.shape[-1]
        return cast, self.shared.project(cast, self.exponents) if self.keep_in else None

    def accumulate(self, x: Tensor | None, projected: Tensor | None, h: Tensor) -> None:
        """Add one backward pass: h [t, rows], x [t, columns] where T is kept, projected [t, r] where S is kept.

        Rows and columns are those of the rectangle that this process computes with.
        """
        if projected is not None:
            self.sketch.on_in = _add_product(self.sketch.on_in, h.T, projected)
        if x is not None:
            rank, width, rows = self.shared.spec.rank_out, self.target.out_features, self.target.sharding.used.rows
            signs = self.capture.shared_signs.matrix(self.out_signs(), rank, width, rows, like=h)
            self.sketch.on_out = _add_product(self.sketch.on_out, (h @ signs).T, x)

    def whole(self, sketch: Sketch) -> Sketch:
        """A sketch as an addend of the whole weight's: its rows and columns in place, zeros for those of other processes.

        Args:
            sketch: what accumulated here; empty where nothing did.
        """
        target, spec = self.target, self.shared.spec
        used, device = target.sharding.used, target.parameter.device
        num_rows, num_columns = used.shape
        on_in, on_out = sketch.on_in, sketch.on_out
        if self.keep_in and (on_in is None or num_rows < target.out_features):
            placed = torch.zeros(target.out_features, spec.rank, device=device)
            if on_in is not None:
                placed[slice(*used.rows)] = on_in
            on_in = placed
        if self.keep_out and (on_out is None or num_columns < target.in_features):
            placed = torch.zeros(spec.rank_out, target.in_features, device=device)
            if on_out is not None:
                placed[:, slice(*used.columns)] = on_out
            on_out = placed
        return Sketch(on_in, on_out)

    def input_moments(self) -> tuple[Tensor, float] | None:
        """Addends of the sum over tokens of the squared inputs, fp32 [in], and of their number; None if nothing ran.

        Processes that split the columns of a weight see the same tokens: each counts for its share of one.
        """
        if self.square_sum is None or self.num_tokens == 0:
            return None
        columns = self.target.sharding.used.columns
        num_columns = columns[1] - columns[0]
        if num_columns == self.target.in_features:
            return self.square_sum, float(self.num_tokens)
        placed = self.square_sum.new_zeros(self.target.in_features)
        placed[slice(*columns)] = self.square_sum
        return placed, self.num_tokens * num_columns / self.target.in_features


def _sum_of_squares(x: Tensor) -> Tensor:
    """Sum over tokens of X² for X [t, in], fp32 [in], without a copy of X."""
    if x.is_cuda:
        norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=torch.float32)
        return norms.square()
    # On a CPU the norms of columns take ten times as long as adding up rows, which lie in one piece.
    total = x.new_zeros(x.shape[-1], dtype=torch.float32)
    for rows in x.split(_SQUARED_ROWS):
        total += rows.float().square().sum(dim=0)
    return total


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
