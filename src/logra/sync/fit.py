"""Does an update fit the weights that are here? Everything that can be wrong is found before anything is written."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from logra.errors import PacketError
from logra.rounding import qmax_of
from logra.storage import on_grid24
from logra.sync.layout import Layout, Piece, Placement
from logra.tensor_delta import TensorDelta
from logra.update import LowRankUpdate, PolicyUpdate, row_blocks

Storage = Literal["fp32", "split32", "split24", "bf16"]
PLANE_DTYPE: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "split32": torch.bfloat16,
    "split24": torch.bfloat16,
    "bf16": torch.bfloat16,
}
MAGNITUDE_LIMIT = 2.0**127
"""Weights stay below half of the largest fp32 number: every sum and every rounding to bf16 is then finite."""


def check_fit(update: PolicyUpdate, layout: Layout, storage: Storage) -> None:
    """Refuse an update whose names, shapes or dtypes do not fit.

    Args:
        update: any update.
        layout: the weights here.
        storage: how they are kept.

    Raises:
        PacketError: with the name of the weight. Nothing has been written.
    """
    for name, weight in update.weights.items():
        placement = _placement(layout, name)
        if placement.shape != tuple(weight.shape):
            raise PacketError(f"update: {name!r} has shape {tuple(weight.shape)}; the weight here is {placement.shape}")
        for piece in placement.pieces:
            if piece.tensor.dtype != PLANE_DTYPE[storage]:
                raise PacketError(
                    f"update: {name!r} is kept here in {piece.tensor.dtype}; storage {storage!r} needs "
                    f"{PLANE_DTYPE[storage]} for a weight that updates change"
                )
    for name, tensor in update.tensors.items():
        check_tensor(name, canonical(tensor, _placement(layout, name)), layout[name], storage)
    for name, delta in update.deltas.items():
        _check_delta(name, canonical_delta(delta, _placement(layout, name)), layout[name], storage)


def check_tensor(name: str, value: Tensor, placement: Placement, storage: Storage) -> None:
    """Refuse a new value of a whole weight that the pieces here cannot hold.

    Args:
        name: canonical name.
        value: the canonical weight.
        placement: its pieces here.
        storage: how weights are kept.

    Raises:
        PacketError: another shape, or a dtype whose values the pieces cannot hold.
    """
    if tuple(value.shape) != placement.shape:
        raise PacketError(
            f"update: tensor {name!r} has shape {tuple(value.shape)}; the weight here is {placement.shape}"
        )
    for piece in placement.pieces:
        if not _holds(piece.tensor.dtype, value.dtype, storage):
            raise PacketError(
                f"update: tensor {name!r} is {value.dtype}; it is kept here in {piece.tensor.dtype}, and storage "
                f"{storage!r} would lose bits of it"
            )
        splits = piece.tensor.dtype == torch.bfloat16 and value.dtype == torch.float32 and value.numel() > 0
        if splits and not float(value.abs().max()) < MAGNITUDE_LIMIT:
            raise PacketError(f"update: tensor {name!r} holds values that are not finite in bf16, which keeps it here")
        if _has_24_bits(piece):
            part = part_of(value, placement, piece)
            for start, stop in row_blocks((part.shape[0], part.shape[1])):
                if not on_grid24(part[start:stop].to(torch.float32)):
                    raise PacketError(
                        f"update: tensor {name!r} holds values of more than the 24 bits that are kept of it here"
                    )


def largest_change(weight: LowRankUpdate) -> float:
    """An upper bound of |dW| over all elements, from the exponents alone."""
    bounds = [1 if factor is None else qmax_of(weight.factor_bits) for factor in (weight.factor_out, weight.factor_in)]
    exponent = int(weight.exponent_out.max()) + int(weight.exponent_in.max())
    return weight.rank * bounds[0] * bounds[1] * 2.0**exponent


def largest_value(placement: Placement) -> float:
    """The largest |w| of the pieces here; NaN if one is NaN."""
    largest = [
        float(block.abs().max()) for piece in placement.pieces for _, block in piece.blocks() if block.numel() > 0
    ]
    return max(largest, default=0.0) if not any(value != value for value in largest) else float("nan")


def canonical(value: Tensor, placement: Placement) -> Tensor:
    """The canonical orientation of a tensor as checkpoints store it."""
    return value.T if placement.transposed and value.ndim == 2 else value


def canonical_delta(delta: TensorDelta, placement: Placement) -> TensorDelta:
    """The canonical orientation of a delta of a tensor as checkpoints store it."""
    return TensorDelta(delta.dtype, canonical(delta.difference, placement))


def part_of_delta(delta: TensorDelta, placement: Placement, piece: Piece) -> TensorDelta:
    """The part of a whole canonical delta that belongs to a piece."""
    return TensorDelta(delta.dtype, part_of(delta.difference, placement, piece))


def part_of(value: Tensor, placement: Placement, piece: Piece) -> Tensor:
    """The rectangle of a whole canonical weight that a piece holds, [rows, columns]."""
    return value.reshape(placement.matrix_shape)[slice(*piece.rows), slice(*piece.columns)]


def _check_delta(name: str, delta: TensorDelta, placement: Placement, storage: Storage) -> None:
    if delta.shape != placement.shape:
        raise PacketError(f"update: delta of {name!r} has shape {delta.shape}; the weight here is {placement.shape}")
    for piece in placement.pieces:
        if not _holds(piece.tensor.dtype, delta.dtype, storage):
            raise PacketError(f"update: delta of {name!r} is of {delta.dtype}; it is kept here in {piece.tensor.dtype}")
        if piece.tensor.dtype == torch.bfloat16 and delta.dtype == torch.float32:
            part = part_of_delta(delta, placement, piece)
            for (start, stop), _ in piece.blocks():
                moved = piece.moved(part, start, stop)
                if not float(moved.abs().max()) < MAGNITUDE_LIMIT:
                    raise PacketError(f"update: delta of {name!r} leads to values that are not finite in bf16")
                if _has_24_bits(piece) and not on_grid24(moved):
                    raise PacketError(
                        f"update: delta of {name!r} leads to values of more than the 24 bits that are kept of it here"
                    )


def _has_24_bits(piece: Piece) -> bool:
    return piece.lo is not None and piece.lo.dtype == torch.int8


def _placement(layout: Layout, name: str) -> Placement:
    if name not in layout:
        raise PacketError(f"update: {name!r} is no weight of this replica; it belongs to another model")
    return layout[name]


def _holds(kept: torch.dtype, given: torch.dtype, storage: Storage) -> bool:
    """Whether a piece of dtype `kept` can hold values of dtype `given`, with the help of the low plane if there is one."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if kept == given:
        return True
    if given not in floats or kept == torch.float16:
        return False
    return kept == torch.float32 or storage != "fp32"
