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
from logra.update import LowRankUpdate, row_blocks

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
    bits = value.view(torch.int32)
    towards_even = ((bits >> 15) & 2) - 1  # +1 (away from zero) where the upper half is odd, else -1
    return torch.where((bits & 0xFFFF) == _TIE, bits + towards_even, bits).view(torch.float32)


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
    # Checked before the integer arithmetic, which would turn some NaN into ordinary numbers.
    if value.numel() > 0 and not float(value.abs().max()) < _LIMIT:
        raise LograError(
            f"split32: the weight holds NaN or values that are not finite in bf16; allowed is < {_LIMIT:g}"
        )
    bits = (nudge_ties(value) if nudge else value).view(torch.int32)
    high_bits = (bits + _TIE) >> 16
    lo = bits - (high_bits << 16)
    return high_bits.to(torch.int16).view(torch.bfloat16), lo.to(torch.int16)


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
    return ((hi.view(torch.int16).to(torch.int32) << 16) + lo).view(torch.float32)


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
    if lo is None and not nudge:
        update.apply_(parameter, rows, columns, block_rows)
        return
    row_start, row_stop = check_range("rows", rows, update.shape[0])
    column_start, column_stop = check_range("columns", columns, update.shape[1])
    shape = (row_stop - row_start, column_stop - column_start)
    _check_planes(parameter, lo, shape)
    update = update.to(parameter.device)
    for start, stop in row_blocks(shape, block_rows):
        block = parameter[start:stop]
        value = block if lo is None else join32(block, lo[start:stop].to(parameter.device))
        update.apply_(value, (row_start + start, row_start + stop), columns)
        if lo is None:
            block.copy_(nudge_ties(value))
            continue
        hi_block, lo_block = split32(value, nudge=nudge)
        block.copy_(hi_block)
        lo[start:stop] = lo_block


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
