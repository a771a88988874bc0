"""How the canonical fp32 value of a weight is kept, and how an update is merged into it.

- `fp32`: the parameter is fp32 and is the value.
- `split32`: the parameter is bf16 and holds `hi`, the value rounded to nearest; an int16 plane `lo` of the same shape
  holds the rest. With the bits of fp32 and bf16 read as integers,

      bits(value) = 2^16 · bits(hi) + lo,        bits(hi) = floor((bits(value) + 2^15) / 2^16),      -2^15 < lo < 2^15

  so forward and backward use `hi` with no second copy, and value = join(hi, lo) is exactly fp32. `lo` equals the low
  16 bits of the value, read in two's complement.
- `split24`: the same with an int8 plane and values of 24 bits,

      bits(value) = 2^16 · bits(hi) + 2^8 · lo,                                                      -2^7 < lo < 2^7

  `lo` equals bits 8 to 15 of the value, read in two's complement; bits 0 to 7 are zero.

The one value that split32 cannot hold with `hi` rounded to nearest even is the exact tie, lo = ±2^15: whether `hi` was
rounded up or down would be lost. So it is with lo = ±2^7 in split24. Training with these weights therefore never leaves a
tie behind (`logra.merge_rule`), and `hi` is the round-to-nearest of the value, however ties are broken.
`split32(value, nudge=False)` holds every value, with ties rounded away from zero and lo = -2^15.

Contract: under one merge rule, merging into any of the planes gives the same bits. Refuses, with `LograError`, values that
are not finite or whose bf16 rounding is not, and values that planes of 24 bits do not hold.
"""

import torch
from torch import Tensor

from logra.errors import LograError, PacketError
from logra.hashing import Range, check_range
from logra.merge_rule import LIMIT24, TIE, MergeRule, nudged_rest_
from logra.update import LowRankUpdate, subtract_

LOW_DTYPES = {"split32": torch.int16, "split24": torch.int8}
"""Dtype of the low plane, by weight storage; fp32 has none."""
_LIMIT = 2.0**128 - 2.0**119  # the tie between the largest bf16 number and infinity


@torch.no_grad()
def split32(value: Tensor, *, nudge: bool = True) -> tuple[Tensor, Tensor]:
    """Split fp32 into the bf16 number nearest to it and the rest.

    Args:
        value: fp32, any shape.
        nudge: True moves ties by `nudge_ties`, so that hi is round-to-nearest-even; False keeps every value, and rounds
            ties away from zero.

    Returns:
        hi, bf16, and lo, int16, of the same shape. join(hi, lo) equals nudge_ties(value) bit for bit, or `value` with
        nudge=False.

    Raises:
        LograError: a value that is not finite, or so large that its bf16 rounding is infinite (above 3.39e38).
    """
    if value.dtype != torch.float32:
        raise LograError(f"split32: value is {value.dtype}; allowed is torch.float32")
    return _planes(value, torch.int16, nudge=nudge)


@torch.no_grad()
def split24(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split values of 24 bits into the bf16 number nearest to them and the rest, exactly.

    Args:
        value: fp32 on the grid of split24, any shape.

    Returns:
        hi, bf16, and lo, int8, of the same shape. join(hi, lo) equals `value` bit for bit.

    Raises:
        LograError: another dtype, or a value that these planes do not hold (see `on_grid24`) or that is not finite.
    """
    if value.dtype != torch.float32 or not on_grid24(value):
        raise LograError(
            f"split24: value is {value.dtype}; allowed is torch.float32 with low bytes of zero and no ties between bf16 "
            f"numbers (low halves of 0x8000)"
        )
    return _planes(value, torch.int8, nudge=False)


@torch.no_grad()
def on_grid24(value: Tensor) -> bool:
    """Whether planes of split24 hold these fp32 values: all low bytes are zero, and none is a tie between bf16 numbers."""
    low = value.view(torch.int32) & 0xFFFF
    return not bool(((low & 0xFF) | (low == TIE)).any())


def narrowed(lo: Tensor) -> Tensor:
    """The int8 plane of values on the grid of split24 from their int16 plane, of any shape; low bytes must be zero.

    In the same memory: that of pinned host memory is pinned.
    """
    return torch.empty_like(lo, dtype=torch.int8, pin_memory=lo.is_pinned()).copy_(lo >> 8)


@torch.no_grad()
def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 value of its two planes, exactly.

    Args:
        hi: bf16, any shape.
        lo: int16 (split32) or int8 (split24), same shape and device.

    Returns:
        fp32 of the same shape.

    Raises:
        LograError: another dtype, or shapes that differ.
    """
    if hi.dtype != torch.bfloat16 or lo.dtype not in LOW_DTYPES.values() or hi.shape != lo.shape:
        raise LograError(
            f"join: hi is {hi.dtype} {tuple(hi.shape)}, lo is {lo.dtype} {tuple(lo.shape)}; allowed are torch.bfloat16, and "
            "torch.int16 or torch.int8, of one shape"
        )
    value = hi.to(torch.float32)  # its bits are those of hi, followed by zeros
    value.view(torch.int32).add_(lo, alpha=_unit(lo))
    return value


@torch.no_grad()
def apply_update_(
    update: LowRankUpdate,
    parameter: Tensor,
    lo: Tensor | None = None,
    *,
    rows: Range | None = None,
    columns: Range | None = None,
    block_rows: int | None = None,
    rule: MergeRule | None = None,
) -> None:
    """Merge an update into a weight in place, in blocks of rows, so that the extra memory is a few blocks.

    Args:
        update: the change, in canonical orientation [out, in].
        parameter: the weight or a shard of it as [rows, columns] in canonical orientation (a transposed view is fine):
            fp32 for storage `fp32`, bf16 for `split32` and `split24`.
        lo: None for storage `fp32`; int16 [rows, columns] for `split32`, int8 for `split24`, on any device (it may stay in
            host memory).
        rows: half-open range of output features that `parameter` holds; None for all.
        columns: half-open range of input features that `parameter` holds; None for all.
        block_rows: rows merged at once; None for blocks of at most 4 MiB of fp32. Does not change the result.
        rule: the merge rule of the run. None for what training with this storage does, in `fp32` and `split32`; that of
            `split24`, which int8 planes need, has noise of the run, the version and the name.

    Raises:
        PacketError: dtypes or shapes that do not fit; nothing has been written then.
        LograError: a value that left the range of bf16 (split32, split24); blocks before it have been written.
    """
    row_start, row_stop = check_range("rows", rows, update.shape[0])
    column_range = check_range("columns", columns, update.shape[1])
    _check_planes(parameter, lo, (row_stop - row_start, column_range[1] - column_range[0]), rule)
    rule = rule or MergeRule("fp32" if lo is None else "split32")
    for (start, stop), change in update.to(parameter.device).changes(rows, columns, block_rows):
        block = parameter[start:stop]
        block_range = (row_start + start, row_start + stop)
        if lo is None:
            subtract_(block, change, update.decay)
            rule.settle_(block, update.shape, block_range, column_range)
            continue
        value = join(block, lo[start:stop].to(block.device))
        subtract_(value, change, update.decay)
        _check_finite(value, torch.int8 if rule.weight_storage == "split24" else torch.int16)
        nudge = rule.weight_storage == "split32"  # splitting does it in one pass less
        if not nudge:
            rule.settle_(value, update.shape, block_range, column_range)
        _split_(value, block, lo[start:stop], nudge=nudge)


def _check_finite(value: Tensor, low: torch.dtype) -> None:
    """Before anything is written: with a low plane of this dtype, is every value finite in bf16?"""
    limit = LIMIT24 if low == torch.int8 else _LIMIT
    lowest, highest = (float(bound) for bound in torch.aminmax(value)) if value.numel() > 0 else (0.0, 0.0)
    if not (lowest > -limit and highest < limit):
        raise LograError(
            f"the weight holds NaN or values that are not finite in bf16, its high plane; allowed is < {limit:g}"
        )


def _planes(value: Tensor, low: torch.dtype, *, nudge: bool) -> tuple[Tensor, Tensor]:
    """New planes of a value, which stays as it is."""
    hi, lo = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=low)
    _check_finite(value, low)
    _split_(value.clone(), hi, lo, nudge=nudge)
    return hi, lo


def _split_(value: Tensor, hi: Tensor, lo: Tensor, *, nudge: bool) -> None:
    """Planes that exist get a value that is finite in bf16; what `value` holds afterwards means nothing."""
    hi.copy_(value)  # to nearest, ties to even
    rest = value.view(torch.int32).sub_(hi.to(torch.float32).view(torch.int32))
    if nudge:
        nudged_rest_(rest)
    elif lo.dtype == torch.int16:
        hi.view(torch.int16).add_(rest == TIE)  # ties away from zero; 2^15 in `rest` becomes -2^15 in 16 bits
    lo.copy_(rest if lo.dtype == torch.int16 else rest.bitwise_right_shift_(8))


def _unit(lo: Tensor) -> int:
    """What one in this low plane is in the bits of the value."""
    return 1 if lo.dtype == torch.int16 else 2**8


def _check_planes(parameter: Tensor, lo: Tensor | None, shape: tuple[int, int], rule: MergeRule | None) -> None:
    planes = (parameter,) if lo is None else (parameter, lo)
    is_24 = rule is not None and rule.weight_storage == "split24" and lo is not None and lo.dtype == torch.int8
    expected = (torch.float32,) if lo is None else (torch.bfloat16, torch.int8 if is_24 else torch.int16)
    if any(plane.dtype != dtype or tuple(plane.shape) != shape for plane, dtype in zip(planes, expected, strict=True)):
        found = ", ".join(
            f"{name} is {plane.dtype} {tuple(plane.shape)}"
            for name, plane in zip(("parameter", "lo"), planes, strict=False)
        )
        raise PacketError(
            f"apply_update_: {found}; this storage needs {' and '.join(map(str, expected))} of shape {shape}"
        )
