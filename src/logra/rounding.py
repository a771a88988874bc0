"""From fp32 factors to integers with power-of-two scales, by unbiased stochastic rounding.

A row x of a factor becomes 2^e · n with one exponent e and integers n:

    e = ceil(log2(max |x| / qmax)),     n = sign(x) floor(|x| / 2^e + u),     u uniform in [0, 1),     E[2^e n] = x

Everything but the choice of u is exact: e comes from the binary representation, |x| / 2^e only moves the exponent, and
the comparison with u uses the exact fraction. |n| <= qmax always. Refuses values that are not finite or too large.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from logra.errors import LograError
from logra.hashing import uniform

# Largest |integer| by factor_bits; symmetric, so that -qmax is representable too.
QMAX: Mapping[int, int] = {4: 7, 8: 127}
# Exponents of two of a row or column. The product of two scales and an integer below 2^24 stays a normal fp32 number:
# 2^-60 · 2^-60 >= 2^-126 and 2^50 · 2^50 · 2^24 < 2^128.
MIN_EXPONENT, MAX_EXPONENT = -60, 50


def qmax_of(factor_bits: int) -> int:
    """Largest |integer| of a factor with `factor_bits` bits.

    Raises:
        LograError: factor_bits is not 4 or 8.
    """
    if factor_bits not in QMAX:
        raise LograError(f"factor_bits is {factor_bits}; allowed are {sorted(QMAX)}")
    return QMAX[factor_bits]


def powers_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp32, made from bits because `pow` is not exact on every device.

    Args:
        exponent: any integer dtype and shape, values in [-126, 127].
    """
    return (exponent.to(torch.int32) + 127).bitwise_left_shift(23).view(torch.float32)


def round_slices(name: str, factor: Tensor, *, dim: int, factor_bits: int, key: int) -> tuple[Tensor, Tensor]:
    """Round a matrix, with one scale for each slice along `dim`. The formula is in the module docstring.

    Args:
        name: name of the factor in error messages.
        factor: fp32 [rows, columns].
        dim: 1 for one scale a row, 0 for one scale a column.
        factor_bits: 4 or 8.
        key: stream of the noise; element (row, column) uses element (row, column) of `hashing.uniform`.

    Returns:
        Integers int8 [rows, columns] and exponents int16 [rows] or [columns]. A slice of zeros has exponent 0.
        Slices below qmax * 2**-60 get exponent -60: most of their elements round to 0, still without bias.

    Raises:
        LograError: another dtype or shape, values that are not finite or above qmax * 2**50 in magnitude.
    """
    qmax = qmax_of(factor_bits)
    if factor.dtype != torch.float32 or factor.ndim != 2 or min(factor.shape) < 1:
        raise LograError(f"{name} is {factor.dtype} {tuple(factor.shape)}; allowed is torch.float32 [>= 1, >= 1]")
    magnitude = factor.abs()
    largest = magnitude.amax(dim, keepdim=True)
    if not torch.isfinite(largest).all():
        raise LograError(f"{name} holds values that are not finite; such a step must be skipped")
    # Smallest e with largest <= qmax * 2^e, from the exact split into a mantissa in [0.5, 1) and an exponent.
    mantissa, exponent = torch.frexp(largest)
    mantissa_of_qmax, exponent_of_qmax = math.frexp(qmax)
    exponent = exponent - exponent_of_qmax + (mantissa > mantissa_of_qmax)
    exponent = torch.where(largest == 0, 0, exponent).clamp_min(MIN_EXPONENT)
    if int(exponent.max()) > MAX_EXPONENT:
        raise LograError(f"{name} reaches {float(largest.max()):g}; allowed is at most {qmax} * 2**{MAX_EXPONENT}")
    magnitude = magnitude * powers_of_two(-exponent)
    integer = magnitude.floor()
    # floor(magnitude + u) as a comparison: computed as a sum it would round, for magnitude = qmax even up to qmax + 1.
    integer += uniform(key, *factor.shape, device=factor.device) < magnitude - integer
    return (integer * factor.sign()).to(torch.int8), exponent.flatten().to(torch.int16)
