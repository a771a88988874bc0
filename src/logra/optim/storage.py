"""How the canonical fp32 value of a weight is kept, and how an update is merged into it.

- `fp32`: the parameter is fp32 and is the value.
- `split32`: the parameter is bf16 and holds `hi`, the value rounded to nearest; an int16 plane `lo` of the same shape
  holds the rest. With the bits of fp32 and bf16 read as integers,

      bits(value) = 2^16 · bits(hi) + lo,        bits(hi) = floor((bits(value) + 2^15) / 2^16),      -2^15 < lo < 2^15

  so forward and backward use `hi` with no second copy, and value = join32(hi, lo) is exactly fp32. `lo` equals the low
  16 bits of the value, read in two's complement.

The one value that this cannot hold is the exact tie, lo = ±2^15: whether `hi` was rounded up or down would be lost.
`nudge_ties` moves such a value by one ulp of fp32 towards the bf16 number that round-to-nearest-even picks. Whoever
must agree bit for bit with a split32 weight while keeping fp32 applies it after every merge as well.

Contract: merging into split32 and merging into fp32 followed by `nudge_ties` give the same bits. Refuses, with
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
def split32(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the bf16 number nearest to it (ties to even) and the rest.

    Args:
        value: fp32, any shape.

    Returns:
        hi, bf16, and lo, int16, of the same shape, with join32(hi, lo) equal to nudge_ties(value) bit for bit.

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
    bits = nudge_ties(value).view(torch.int32)
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

    Raises:
        PacketError: dtypes or shapes that do not fit; nothing has been written then.
        LograError: a value that left the range of bf16 (split32); blocks before it have been written.
    """
    if lo is None:
        update.apply_(parameter, rows, columns, block_rows)
        return
    row_start, row_stop = check_range("rows", rows, update.shape[0])
    column_start, column_stop = check_range("columns", columns, update.shape[1])
    shape = (row_stop - row_start, column_stop - column_start)
    planes_fit = parameter.dtype == torch.bfloat16 and lo.dtype == torch.int16
    if not planes_fit or tuple(parameter.shape) != shape or tuple(lo.shape) != shape:
        raise PacketError(
            f"apply_update_: parameter is {parameter.dtype} {tuple(parameter.shape)}, lo is {lo.dtype} "
            f"{tuple(lo.shape)}; split32 needs torch.bfloat16 and torch.int16 of shape {shape}"
        )
    update = update.to(parameter.device)
    for start, stop in row_blocks(shape, block_rows):
        value = join32(parameter[start:stop], lo[start:stop].to(parameter.device))
        update.apply_(value, (row_start + start, row_start + stop), columns)
        hi_block, lo_block = split32(value)
        parameter[start:stop] = hi_block
        lo[start:stop] = lo_block
