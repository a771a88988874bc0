"""How the canonical fp32 value of a weight is kept, and how an update is merged into it.

- `fp32`: the parameter is fp32 and is the value.
- `split32`: the parameter is bf16 and holds `hi`, the value rounded to nearest; an int16 plane `lo` of the same shape
  holds the rest. With the bits of fp32 and bf16 read as integers,

      bits(value) = 2^16 · bits(hi) + lo,        bits(hi) = floor((bits(value) + 2^15) / 2^16),      -2^15 < lo < 2^15

  so forward and backward use `hi` with no second copy, and value = join32(hi, lo) is exactly fp32. `lo` equals the low
  16 bits of the value, read in two's complement.

The one value that this cannot hold with `hi` rounded to nearest even is the exact tie, lo = ±2^15: whether `hi` was
rounded up or down would be lost. `nudge_ties` moves such a value by one ulp of fp32 towards the bf16 number that
round-to-nearest-even picks. Training with split32 weights nudges after every merge, and training with fp32 weights does
not: that is the merge rule of a run, and whoever must agree with it bit for bit follows the same rule, whatever the
planes it keeps. `split32(value, nudge=False)` holds every value, with ties rounded away from zero and lo = -2^15.

Contract: under one merge rule, merging into split32 and merging into fp32 give the same bits. Refuses, with
`LograError`, values that are not finite or whose bf16 rounding is not.
"""

import torch
from torch import Tensor

from logra.errors import LograError, PacketError
from logra.hashing import Range, check_range
from logra.update import LowRankUpdate, subtract_

_TIE = 0x8000
_LIMIT = 2.0**128 - 2.0**119  # the tie between the largest bf16 number and infinity


@torch.no_grad()
def nudge_ties(value: Tensor) -> Tensor:
    """`value` with every tie between two bf16 numbers moved by one ulp towards the one with the even mantissa.

    Args:
        value: fp32, any shape, finite.

    Returns:
        fp32 of the same shape; differs from `value` only where its low 16 bits are 0x8000. Applying it twice changes
        nothing more, and rounding to bf16 gives the same result before and after.
    """
    nudged = value.clone()
    _nudge_(nudged)
    return nudged


@torch.no_grad()
def split32(value: Tensor, *, nudge: bool = True) -> tuple[Tensor, Tensor]:
    """Split fp32 into the bf16 number nearest to it and the rest.

    Args:
        value: fp32, any shape.
        nudge: True moves ties by `nudge_ties`, so that hi is round-to-nearest-even; False keeps every value, and rounds
            ties away from zero.

    Returns:
        hi, bf16, and lo, int16, of the same shape. join32(hi, lo) equals nudge_ties(value) bit for bit, or `value` with
        nudge=False.

    Raises:
        LograError: a value that is not finite, or so large that its bf16 rounding is infinite (above 3.39e38).
    """
    if value.dtype != torch.float32:
        raise LograError(f"split32: value is {value.dtype}; allowed is torch.float32")
    hi = torch.empty_like(value, dtype=torch.bfloat16)
    lo = torch.empty_like(value, dtype=torch.int16)
    _split_(value.clone(), hi, lo, nudge=nudge)
    return hi, lo


@torch.no_grad()
def join32(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 value of its two planes, exactly.

    Args:
        hi: bf16, any shape.
        lo: int16, same shape and device.

    Returns:
        fp32 of the same shape.

    Raises:
        LograError: another dtype, or shapes that differ.
    """
    if hi.dtype != torch.bfloat16 or lo.dtype != torch.int16 or hi.shape != lo.shape:
        raise LograError(
            f"join32: hi is {hi.dtype} {tuple(hi.shape)}, lo is {lo.dtype} {tuple(lo.shape)}; "
            "allowed are torch.bfloat16 and torch.int16 of one shape"
        )
    value = hi.to(torch.float32)  # its bits are those of hi, followed by zeros
    value.view(torch.int32).add_(lo)
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
    nudge: bool | None = None,
) -> None:
    """Merge an update into a weight in place, in blocks of rows, so that the extra memory is a few blocks.

    Args:
        update: the change, in canonical orientation [out, in].
        parameter: the weight or a shard of it as [rows, columns] in canonical orientation (a transposed view is fine):
            fp32 for storage `fp32`, bf16 for `split32`.
        lo: None for storage `fp32`; int16 [rows, columns] for `split32`, on any device (it may stay in host memory).
        rows: half-open range of output features that `parameter` holds; None for all.
        columns: half-open range of input features that `parameter` holds; None for all.
        block_rows: rows merged at once; None for blocks of at most 4 MiB of fp32. Does not change the result.
        nudge: the merge rule: nudge ties after the merge, or not. None for what training with this storage does
            (split32 nudges, fp32 does not).

    Raises:
        PacketError: dtypes or shapes that do not fit; nothing has been written then.
        LograError: a value that left the range of bf16 (split32); blocks before it have been written.
    """
    nudge = (lo is not None) if nudge is None else nudge
    row_start, row_stop = check_range("rows", rows, update.shape[0])
    column_start, column_stop = check_range("columns", columns, update.shape[1])
    _check_planes(parameter, lo, (row_stop - row_start, column_stop - column_start))
    for (start, stop), change in update.to(parameter.device).changes(rows, columns, block_rows):
        block = parameter[start:stop]
        if lo is None:
            subtract_(block, change, update.decay)
            if nudge:
                _nudge_(block)
            continue
        value = join32(block, lo[start:stop].to(block.device))
        subtract_(value, change, update.decay)
        _split_(value, block, lo[start:stop], nudge=nudge)


def _nudge_(value: Tensor) -> None:
    """`nudge_ties` in place."""
    bits = value.view(torch.int32)
    rounded = value.to(torch.bfloat16).to(torch.float32).view(torch.int32)
    torch.add(rounded, _nudged(bits - rounded), out=bits)


def _split_(value: Tensor, hi: Tensor, lo: Tensor, *, nudge: bool) -> None:
    """`split32` into planes that exist; what `value` holds afterwards means nothing."""
    # Checked before anything is written.
    lowest, highest = (float(bound) for bound in torch.aminmax(value)) if value.numel() > 0 else (0.0, 0.0)
    if not (lowest > -_LIMIT and highest < _LIMIT):
        raise LograError(
            f"split32: the weight holds NaN or values that are not finite in bf16; allowed is < {_LIMIT:g}"
        )
    hi.copy_(value)  # to nearest, ties to even
    rest = value.view(torch.int32).sub_(hi.to(torch.float32).view(torch.int32))
    if nudge:
        _nudged(rest)
    else:
        hi.view(torch.int16).add_(rest == _TIE)  # ties away from zero; 2^15 in `rest` becomes -2^15 in 16 bits
    lo.copy_(rest)


def _nudged(rest: Tensor) -> Tensor:
    """What a value exceeds its rounded one by, int32, in place: a tie, ±2^15, is one ulp less far away."""
    return rest.clamp_(-_TIE + 1, _TIE - 1)


def _check_planes(parameter: Tensor, lo: Tensor | None, shape: tuple[int, int]) -> None:
    expected = (torch.float32,) if lo is None else (torch.bfloat16, torch.int16)
    planes = (parameter,) if lo is None else (parameter, lo)
    if any(plane.dtype != dtype or tuple(plane.shape) != shape for plane, dtype in zip(planes, expected, strict=True)):
        found = ", ".join(
            f"{name} is {plane.dtype} {tuple(plane.shape)}"
            for name, plane in zip(("parameter", "lo"), planes, strict=False)
        )
        raise PacketError(
            f"apply_update_: {found}; this storage needs {' and '.join(map(str, expected))} of shape {shape}"
        )
