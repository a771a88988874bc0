"""One number for all weights of a model: the same on every device, thread count, storage and slicing.

The bits of a canonical weight, as fp32, are a matrix x [rows, columns] of signed 32-bit integers. Its checksum is

    D = Σ_i v_i Σ_j u_j x_ij   mod 2^64

with odd 64-bit multipliers u (by column) and v (by row) from `logra.hashing`. Arithmetic modulo 2^64 has no rounding, so
the order of summation does not matter, and the checksum of a weight is the sum of the checksums of its parts: each shard
computes its own with its own ranges. Any single changed element changes D; other accidents escape with a probability
of about 2^-32 or less. The digest of a model is the SHA-256 of the names, shapes and checksums of its weights.

It finds accidents (a wrong base, a lost update, a broken kernel); it is no protection against somebody who wants two
models to agree. Packets carry SHA-256 seals of their own.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from logra.errors import LograError, SyncError
from logra.hashing import Range, derive_key, hash_words

_MODULUS = 2**64
_MAGIC = b"LOGRAWTS"


@torch.no_grad()
def checksum(matrix: Tensor, row_start: int = 0, column_start: int = 0) -> int:
    """D of a part of a weight.

    Args:
        matrix: fp32 [rows, columns], any strides; make blocks of a few MiB, it is widened to 64 bits.
        row_start: first row of the whole weight that the part holds.
        column_start: first column of the whole weight that the part holds.

    Returns:
        In [0, 2**64).

    Raises:
        LograError: another dtype, or not two dimensions.
    """
    if matrix.dtype != torch.float32 or matrix.ndim != 2:
        raise LograError(f"checksum: matrix is {matrix.dtype} {tuple(matrix.shape)}; allowed is torch.float32 [., .]")
    num_rows, num_columns = matrix.shape
    device = str(matrix.device)
    # int64 arithmetic wraps, which is arithmetic modulo 2^64.
    words = matrix.contiguous().view(torch.int32).to(torch.int64)
    rows = words.mul_(_multipliers("column", column_start, column_start + num_columns, device)).sum(1)
    return int(rows.mul_(_multipliers("row", row_start, row_start + num_rows, device)).sum()) % _MODULUS


def combine(checksums: Mapping[str, tuple[tuple[int, ...], int]]) -> str:
    """The digest of a model.

    Args:
        checksums: {name: (shape of the canonical weight, checksum of the whole weight)}.

    Returns:
        64 hexadecimal digits.
    """
    hasher = hashlib.sha256(_MAGIC)
    for name in sorted(checksums):
        shape, value = checksums[name]
        encoded = name.encode("utf-8")
        hasher.update(struct.pack("<I", len(encoded)) + encoded)
        hasher.update(struct.pack(f"<I{len(shape)}QQ", len(shape), *shape, value))
    return hasher.hexdigest()


def total(parts: Iterable[int]) -> int:
    """The checksum of a weight from those of parts that cover it once."""
    return sum(parts) % _MODULUS


@dataclass(frozen=True)
class ChecksumPart:
    """The checksum of a rectangle of a weight.

    Attributes:
        name: canonical name of the weight.
        shape: of the whole weight.
        rows: half-open range of rows of the rectangle.
        columns: half-open range of columns of the rectangle.
        checksum: in [0, 2**64).
    """

    name: str
    shape: tuple[int, ...]
    rows: Range
    columns: Range
    checksum: int


def combine_parts(parts: Iterable[ChecksumPart]) -> str:
    """The digest of a model of which every rank holds a part.

    Args:
        parts: of all ranks. A rectangle that several ranks hold counts once.

    Returns:
        64 hexadecimal digits.

    Raises:
        SyncError: ranks disagree about a rectangle that they both hold, or the rectangles do not cover a weight once.
    """
    found: dict[str, dict[tuple[Range, Range], ChecksumPart]] = {}
    for part in parts:
        other = found.setdefault(part.name, {}).setdefault((part.rows, part.columns), part)
        if other != part:
            raise SyncError(
                f"combine_parts: ranks disagree about {part.name!r}, rows {part.rows}, columns {part.columns}"
            )
    checksums = {}
    for name, rectangles in found.items():
        shape = next(iter(rectangles.values())).shape
        areas = [(rows[1] - rows[0]) * (columns[1] - columns[0]) for rows, columns in rectangles]
        if sum(areas) != math.prod(as_matrix_shape(shape)):
            raise SyncError(f"combine_parts: {name!r} has shape {shape}; the parts cover {sum(areas)} elements of it")
        checksums[name] = (shape, total(part.checksum for part in rectangles.values()))
    return combine(checksums)


def as_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) as which a tensor of any shape is seen: its first dimension, and the product of the others."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


@lru_cache(maxsize=64)
def _multipliers(side: str, start: int, stop: int, device: str) -> Tensor:
    """Odd numbers modulo 2^64 as int64 [stop - start]: number i is word(2 i) + 2^32 word(2 i + 1), its lowest bit set."""
    index = torch.arange(2 * start, 2 * stop, device=device)
    low, high = hash_words(derive_key("weights digest", side), index).view(-1, 2).unbind(1)
    signed_high = torch.where(high >= 2**31, high - 2**32, high)
    return signed_high.mul_(2**32).add_(low).bitwise_or_(1)
