"""Where the canonical weights of a policy live: whole in a module, or in pieces of the tensors of an engine.

A *canonical weight* is what an update names: fully qualified name, shape (out, in), fp32 values. A *piece* is a
rectangle of it and the tensor that holds the rectangle, in canonical orientation: a parameter, a view of one (a
transposed `Conv1D`, the q rows of a fused qkv_proj), a row or column shard on one rank. A *layout* maps every canonical
name to its pieces here; what lives on another rank has none.

Contract: pieces of one weight do not overlap, and merging into all pieces gives the bits of merging into the whole.
Refuses tensors that do not fit their ranges, and quantised parameters, by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import LograError
from logra.hashing import Range
from logra.shards import is_sharded, local, reshard
from logra.sketch.experts import fused_weights, slice_name
from logra.sketch.targets import canonical_fqn
from logra.storage import join, split24, split32
from logra.sync import digest
from logra.sync.digest import as_matrix_shape
from logra.tensor_delta import TensorDelta
from logra.update import row_blocks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Piece:
    """A rectangle of a canonical weight and the tensor that holds it.

    Attributes:
        tensor: [rows, columns] in canonical orientation, any strides, fp32, bf16 or fp16; changed in place.
        rows: half-open range of rows of the whole weight.
        columns: half-open range of columns of the whole weight.
        lo: [rows, columns], the low plane of a bf16 `tensor`, int16 or int8 (`logra.storage`); None where it is zero or
            there is none.
        low_on_host: a low plane that the piece gets from now on lies in host memory, pinned where `tensor` is on a GPU;
            False for the device of `tensor`.

    Raises:
        LograError: the tensor does not fit the ranges, or has a dtype that no storage holds.
    """

    tensor: Tensor
    rows: Range
    columns: Range
    lo: Tensor | None = None
    low_on_host: bool = False

    def __post_init__(self) -> None:
        expected = (self.rows[1] - self.rows[0], self.columns[1] - self.columns[0])
        if tuple(self.tensor.shape) != expected or min(*self.rows, *self.columns) < 0:
            raise LograError(
                f"Piece: tensor has shape {tuple(self.tensor.shape)}; rows {self.rows} and columns {self.columns} need "
                f"{expected}"
            )
        if self.tensor.dtype not in _DTYPES:
            raise LograError(f"Piece: tensor is {self.tensor.dtype} (quantised?); allowed are {_DTYPES}")

    @property
    def num_elements(self) -> int:
        """Number of elements of the rectangle."""
        return self.tensor.numel()

    def blocks(self) -> Iterator[tuple[Range, Tensor]]:
        """Row ranges inside the piece and the fp32 values of these rows, a few MiB at a time.

        A block of an fp32 piece is a view of it: do not write into it.
        """
        for start, stop in row_blocks((self.tensor.shape[0], self.tensor.shape[1])):
            yield (start, stop), self.value(start, stop)

    def value(self, start: int, stop: int) -> Tensor:
        """The fp32 values of rows start to stop of the piece (a view where the piece is fp32)."""
        block = self.tensor[start:stop]
        if self.lo is None:
            return block.to(torch.float32)
        return join(block, self.lo[start:stop].to(block.device))

    def add_low(self, dtype: torch.dtype) -> None:
        """Give the piece a low plane of zeros where it has none.

        Args:
            dtype: int16, or int8 in runs with 24-bit weights.
        """
        if self.lo is None:
            device = torch.device("cpu") if self.low_on_host else self.tensor.device
            pinned = self.low_on_host and self.tensor.is_cuda
            self.lo = torch.zeros_like(self.tensor, dtype=dtype, device=device, pin_memory=pinned)

    def write(self, value: Tensor, *, keep_low: bool, start: int = 0) -> None:
        """Replace the whole piece, or rows of it.

        Args:
            value: [rows, columns], any device, a dtype that the piece may hold.
            keep_low: keep what a bf16 piece cannot hold in its low plane, exactly; False rounds it away. A piece without
                one gets one of 16 bits.
            start: the first row that is replaced.

        Raises:
            LograError: a plane of 8 bits does not hold the value.
        """
        rows = slice(start, start + value.shape[0])
        if not (keep_low and self.tensor.dtype == torch.bfloat16 and value.dtype != torch.bfloat16):
            self.tensor[rows].copy_(value)
            if value.shape[0] == self.tensor.shape[0]:
                self.lo = None
            elif self.lo is not None:
                self.lo[rows] = 0
            return
        value = value.to(device=self.tensor.device, dtype=torch.float32)
        self.add_low(torch.int16)
        assert self.lo is not None
        high, low = split24(value) if self.lo.dtype == torch.int8 else split32(value, nudge=False)
        self.tensor[rows].copy_(high)
        self.lo[rows].copy_(low)

    def moved(self, delta: TensorDelta, start: int, stop: int) -> Tensor:
        """The values of rows start to stop after a delta, in its dtype.

        Args:
            delta: of the whole piece, [rows, columns], on any device.
            start: first row.
            stop: end of the rows.
        """
        old = self.value(start, stop).to(delta.dtype)
        return TensorDelta(delta.dtype, delta.difference[start:stop].to(old.device)).applied(old)

    def checksum(self, *, rounded: bool = False) -> int:
        """The part of the weight's checksum that this piece contributes.

        Args:
            rounded: of the values rounded to bf16.
        """
        parts = []
        for (start, _), block in self.blocks():
            value = block.to(torch.bfloat16).to(torch.float32) if rounded else block
            parts.append(digest.checksum(value, self.rows[0] + start, self.columns[0]))
        return digest.total(parts)


@dataclass(frozen=True, eq=False)
class Placement:
    """All pieces of one canonical weight that live here.

    Attributes:
        shape: of the whole canonical weight. Weights that are no matrices are seen as [shape[0], product of the rest].
        pieces: disjoint rectangles; none where the weight lives elsewhere.
        transposed: checkpoints and modules store the transpose of the canonical weight (`Conv1D`).

    Raises:
        LograError: a piece that leaves the weight, or pieces that overlap.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        num_rows, num_columns = self.matrix_shape
        for index, piece in enumerate(self.pieces):
            if piece.rows[1] > num_rows or piece.columns[1] > num_columns:
                raise LograError(f"Placement: rows {piece.rows}, columns {piece.columns} leave the shape {self.shape}")
            for other in self.pieces[:index]:
                if _overlap(piece.rows, other.rows) and _overlap(piece.columns, other.columns):
                    raise LograError(
                        f"Placement: pieces overlap, rows {piece.rows} and {other.rows}, columns {piece.columns} and "
                        f"{other.columns}"
                    )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape as rows and columns."""
        return as_matrix_shape(self.shape)

    @property
    def is_complete(self) -> bool:
        """The pieces here cover the whole weight."""
        num_rows, num_columns = self.matrix_shape
        return sum(piece.num_elements for piece in self.pieces) == num_rows * num_columns


Layout = Mapping[str, Placement]


def module_layout(model: nn.Module) -> dict[str, Placement]:
    """The layout of a module: every parameter whole, or what this rank stores of it, under its name without wrapper segments.

    Parameters that are DTensors (FSDP2, tensor parallelism) have the piece of this rank, which is none where there are
    fewer rows than ranks. A tied parameter appears once, under its first name. Fused weights of experts appear as those of
    every expert (see `logra.sketch.experts`).

    Raises:
        LograError: a parameter is quantised, on the meta device, or sharded in a way that is no rectangle, as fused weights
            of experts are whenever they are sharded.
    """
    reshard(model)
    layout: dict[str, Placement] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=canonical_fqn(module_name), recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if name.rpartition(".")[2] in fused_weights(module):
                if is_sharded(parameter):
                    raise LograError(
                        f"{name!r}: fused weights of experts are followed expert by expert, and this one is sharded (FSDP2, "
                        f"tensor parallelism). Let the replica hold the whole model in one process, or leave the experts "
                        f"out of what is sharded."
                    )
                for index in range(len(parameter)):
                    layout[slice_name(name, index)] = _placement(name, parameter.detach()[index], transposed=False)
                continue
            layout[name] = _placement(name, parameter, transposed=_stores_transpose(module, name))
    return layout


def fused_rows(tensor: Tensor, parts: Sequence[tuple[str, Range, Range]]) -> dict[str, Piece]:
    """The pieces of a tensor that stacks rows of several weights, as the fused qkv_proj and gate_up_proj of engines do.

    Args:
        tensor: [sum of the rows, columns], the parameter of the engine on this rank.
        parts: (canonical name, rows of that weight, columns of that weight), in the order in which they are stacked.

    Returns:
        {canonical name: the piece}.

    Raises:
        LograError: the parts do not add up to the tensor, or a name occurs twice.

    Example:
        >>> qkv = torch.zeros(8 + 4 + 4, 32)
        >>> pieces = fused_rows(qkv, [("q", (0, 8), (0, 32)), ("k", (0, 4), (0, 32)), ("v", (0, 4), (0, 32))])
        >>> pieces["v"].tensor.data_ptr() == qkv[12:].data_ptr()
        True
    """
    sizes = [rows[1] - rows[0] for _, rows, _ in parts]
    if sum(sizes) != tensor.shape[0]:
        raise LograError(f"fused_rows: the parts have {sizes} rows, the tensor has {tensor.shape[0]}")
    if len({name for name, _, _ in parts}) < len(parts):
        raise LograError(f"fused_rows: a name occurs twice in {[name for name, _, _ in parts]}")
    blocks = tensor.detach().split(sizes)
    return {name: Piece(block, rows, columns) for block, (name, rows, columns) in zip(blocks, parts, strict=True)}


def canonical_weights(layout: Layout) -> dict[str, Tensor]:
    """{name: the canonical weight}, fp32 where the weight has a low plane and in its own dtype otherwise; views where
    possible.

    Raises:
        LograError: a weight of which only a part lives here.
    """
    weights = {}
    for name, placement in layout.items():
        if len(placement.pieces) != 1 or not placement.is_complete:
            raise LograError(f"canonical_weights: {name!r} does not live here as one piece")
        piece = placement.pieces[0]
        value = piece.tensor if piece.lo is None else piece.value(0, piece.tensor.shape[0])
        weights[name] = value.view(placement.shape)
    return weights


def weights_digest(layout: Layout, *, rounded: bool = False) -> str | None:
    """The digest of all weights of a layout, 64 hexadecimal digits; None if some live elsewhere.

    Args:
        layout: the weights.
        rounded: of the values rounded to bf16.
    """
    if not all(placement.is_complete for placement in layout.values()):
        return None
    return digest.combine(
        {
            name: (placement.shape, digest.total(piece.checksum(rounded=rounded) for piece in placement.pieces))
            for name, placement in layout.items()
        }
    )


def whole_piece(tensor: Tensor) -> Piece:
    """A tensor of any shape as one piece.

    Raises:
        LograError: a tensor of three or more dimensions whose strides allow no view as a matrix.
    """
    num_rows, num_columns = as_matrix_shape(tuple(tensor.shape))
    if tensor.ndim != 2:
        try:
            tensor = tensor.view(num_rows, num_columns)
        except RuntimeError as error:
            raise LograError(f"a tensor of shape {tuple(tensor.shape)} cannot be seen as a matrix: {error}") from error
    return Piece(tensor, (0, num_rows), (0, num_columns))


def _placement(name: str, parameter: Tensor, *, transposed: bool) -> Placement:
    if parameter.is_meta or parameter.dtype not in _DTYPES:
        kind = "on the meta device" if parameter.is_meta else f"{type(parameter).__name__} of {parameter.dtype}"
        raise LograError(
            f"parameter {name!r} is {kind}; a replica needs loaded, unquantised parameters in fp32, bf16 or fp16"
        )
    shape = tuple(parameter.shape)[::-1] if transposed else tuple(parameter.shape)
    pieces = _shards(name, parameter) if is_sharded(parameter) else (whole_piece(parameter.detach()),)
    if transposed:
        pieces = tuple(Piece(piece.tensor.T, piece.columns, piece.rows) for piece in pieces)
    return Placement(shape, pieces, transposed)


def _shards(name: str, parameter: Any) -> tuple[Piece, ...]:
    """What this rank stores of a DTensor, as the module stores it; a view."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held = local(parameter)
    kinds = {type(placement) for placement in parameter.placements}
    last = max((placement.dim for placement in parameter.placements if isinstance(placement, Shard)), default=0)
    if not kinds <= {Shard, Replicate} or last >= min(2, max(1, parameter.ndim)):
        raise LograError(
            f"parameter {name!r} is distributed as {parameter.placements}; a replica needs a range of rows or columns: "
            f"Shard(0), Shard(1) or Replicate()"
        )
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert tuple(shape) == tuple(held.shape), "the local tensor of a DTensor has the shape that its placements say"
    if held.numel() == 0:
        return ()
    whole = whole_piece(held)
    rows, columns = as_matrix_shape(tuple(held.shape))
    first_row = offset[0] if parameter.ndim else 0
    first_column = offset[1] if parameter.ndim == 2 else 0
    return (Piece(whole.tensor, (first_row, first_row + rows), (first_column, first_column + columns)),)


def _stores_transpose(module: nn.Module, name: str) -> bool:
    # transformers' Conv1D by name: the core does not import transformers.
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and name.rpartition(".")[2] == "weight"


def _overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]
