"""Counter-based random numbers: the same bits for the same (key, index) on every device, shard and slice.

Owns the only source of randomness that trainer and replicas must agree on: projection signs and rounding noise.
Nothing is stored and nothing advances; element i of stream `key` is a pure function of the pair:

    word(key, i) = mix(mix(lo(i) ^ lo(k)) ^ (hi(k) + ODD * hi(i) mod 2^32))      lo, hi: 32-bit halves

with k the first 64 bits of the SHA-256 of the key, so that related keys get unrelated streams.

`mix` is an invertible 32-bit finaliser (xor-shift, multiply, and again). All arithmetic is in integers, on int64
tensors without overflow, or on int32 tensors modulo 2^32 (`element_words`, `uniform`), so CPU and GPU agree bit for
bit. Not cryptographic.
"""

import hashlib

import torch
from torch import Tensor

from logra.errors import LograError

Range = tuple[int, int]

_MASK = 0xFFFFFFFF
_ODD = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive high halves of the index over the 32-bit range
_SIGNS_PER_WORD = 32
_FLOAT_ONE = 0x3F800000  # bits of 1.0 in fp32


def derive_key(*parts: int | str) -> int:
    """A 64-bit key for a random stream from what names it.

    The parts are encoded with type and length before hashing, so ("ab", "c"), ("a", "bc"), (1,) and ("1",) all differ.

    Args:
        parts: integers (any size, any sign) and strings, at least one.

    Returns:
        The first 64 bits of the SHA-256 of the encoding, in [0, 2**64).

    Raises:
        LograError: no part, or a part that is neither int nor str (bool is refused).

    Example:
        >>> derive_key("projection", 0, 1) == derive_key("projection", 0, 1)
        True
    """
    if not parts:
        raise LograError("derive_key: got no parts; pass at least one int or str")
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise LograError(f"derive_key: part {part!r} has type {type(part).__name__}; allowed are int and str")
        tag = b"s" if isinstance(part, str) else b"i"
        encoded = str(part).encode("utf-8", "surrogatepass")
        digest.update(tag + len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest()[:8], "little")


def hash_words(key: int, index: Tensor) -> Tensor:
    """32 random bits for each index of stream `key`.

    Args:
        key: stream, in [0, 2**64).
        index: int64, any shape, values in [0, 2**63).

    Returns:
        int64 of the shape of `index`, values in [0, 2**32).

    Raises:
        LograError: key out of range, or index not int64.

    Source:
        The constants of the finaliser are those of Chris Wellons' hash-prospector (exact bias 0.107).
    """
    _check_key("hash_words", key)
    if index.dtype != torch.int64:
        raise LograError(f"hash_words: index has dtype {index.dtype}; allowed is torch.int64")
    hashed_key = derive_key(key)
    low_key, high_key = hashed_key & _MASK, hashed_key >> 32
    outer_key = (index >> 32).mul_(_signed(_ODD)).add_(high_key).bitwise_and_(_MASK)
    words = _mix_((index & _MASK).bitwise_xor_(low_key))
    return _mix_(words.bitwise_xor_(outer_key))


def signs(
    key: int,
    num_rows: int,
    width: int,
    *,
    rows: Range | None = None,
    columns: Range | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A matrix of random signs, or a slice of it.

    Element (row, col) is +1 where bit (col mod 32) of word(key, row * ceil(width / 32) + col // 32) is set, else -1.
    A slice equals the same slice of the whole matrix, and fewer rows are a prefix of more rows.

    Args:
        key: stream, from `derive_key`.
        num_rows: rows of the whole matrix.
        width: columns of the whole matrix.
        rows: half-open range of rows to generate; None for all.
        columns: half-open range of columns to generate; None for all.
        device: where to generate; None for the CPU.
        dtype: dtype of the result, any that holds +1 and -1.

    Returns:
        `dtype` [rows, columns] with entries +1 and -1, contiguous.

    Raises:
        LograError: a range that leaves the matrix.
    """
    row_start, row_stop = check_range("rows", rows, num_rows)
    column_start, column_stop = check_range("columns", columns, width)
    words_per_row = -(-width // _SIGNS_PER_WORD)
    word_start, word_stop = column_start // _SIGNS_PER_WORD, -(-column_stop // _SIGNS_PER_WORD)
    index = torch.arange(row_start, row_stop, device=device).mul_(words_per_row).unsqueeze(1) + torch.arange(
        word_start, word_stop, device=device
    )
    # A set bit of the word must become a clear sign bit of an fp32, so every bit is flipped: the lower 31 by the
    # exclusive or, the highest by the subtraction, which also brings the value into the range of int32.
    flipped = hash_words(key, index).bitwise_xor_(2**31 - 1).sub_(2**31).to(torch.int32)
    shifts = torch.arange(_SIGNS_PER_WORD - 1, -1, -1, dtype=torch.int32, device=device)
    # Bit b of a word moves to the sign position of an fp32 whose other bits are those of 1.0.
    bits = (flipped.unsqueeze(-1) << shifts).bitwise_and_(-(2**31)).bitwise_or_(_FLOAT_ONE)
    offset = word_start * _SIGNS_PER_WORD
    matrix = bits.view(torch.float32).view(row_stop - row_start, word_stop * _SIGNS_PER_WORD - offset)
    return matrix[:, column_start - offset : column_stop - offset].contiguous().to(dtype)


def uniform(
    key: int,
    num_rows: int,
    width: int,
    *,
    rows: Range | None = None,
    columns: Range | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """A matrix of random numbers in [0, 1), or a slice of it; all are multiples of 2**-24, hence exact in fp32.

    Element (row, col) is floor(word(key, row * width + col) / 2**8) / 2**24.

    Args:
        key: stream, from `derive_key`.
        num_rows: rows of the whole matrix.
        width: columns of the whole matrix.
        rows: half-open range of rows to generate; None for all.
        columns: half-open range of columns to generate; None for all.
        device: where to generate; None for the CPU.

    Returns:
        fp32 [rows, columns], contiguous.

    Raises:
        LograError: key out of range, or a range that leaves the matrix.
    """
    words = element_words(key, num_rows, width, rows=rows, columns=columns, device=device)
    # The shift fills with the sign; what is left of the word is a number below 2^24.
    return words.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def element_words(
    key: int,
    num_rows: int,
    width: int,
    *,
    rows: Range | None = None,
    columns: Range | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """32 random bits for each element of a matrix, or of a slice of it.

    Element (row, col) has the bits of word(key, row * width + col). In arithmetic modulo 2^32 on half the bytes, which is
    faster than `hash_words`.

    Args:
        key: stream, from `derive_key`.
        num_rows: rows of the whole matrix.
        width: columns of the whole matrix.
        rows: half-open range of rows; None for all.
        columns: half-open range of columns; None for all.
        device: where to generate; None for the CPU.

    Returns:
        int32 [rows, columns], contiguous: the words in two's complement.

    Raises:
        LograError: key out of range, or a range that leaves the matrix.
    """
    _check_key("element_words", key)
    row_start, row_stop = check_range("rows", rows, num_rows)
    column_start, column_stop = check_range("columns", columns, width)
    hashed_key = derive_key(key)
    low_key, high_key = hashed_key & _MASK, hashed_key >> 32
    first = torch.arange(row_start, row_stop, device=device).mul_(width).unsqueeze(1)
    column = torch.arange(column_start, column_stop, device=device)
    # To int32 and between int32, everything is modulo 2^32.
    words = first.to(torch.int32) + column.to(torch.int32)
    lowest, highest = row_start * width + column_start, (row_stop - 1) * width + column_stop - 1
    _mix32_(words.bitwise_xor_(_signed(low_key)))
    if lowest >> 32 == highest >> 32:
        words.bitwise_xor_(_signed((high_key + _ODD * (lowest >> 32)) & _MASK))
    else:
        high = first.add(column).bitwise_right_shift_(32).to(torch.int32)
        words.bitwise_xor_(high.mul_(_signed(_ODD)).add_(_signed(high_key)))
    return _mix32_(words)


def check_range(name: str, bounds: Range | None, size: int) -> Range:
    """`bounds`, or (0, size) for None.

    Raises:
        LograError: not 0 <= start <= stop <= size.
    """
    if bounds is None:
        return 0, size
    start, stop = bounds
    if not 0 <= start <= stop <= size:
        raise LograError(f"{name} is ({start}, {stop}); allowed is 0 <= start <= stop <= {size}")
    return start, stop


def _check_key(function: str, key: int) -> None:
    if not 0 <= key < 2**64:
        raise LograError(f"{function}: key is {key}; allowed is 0 <= key < 2**64 (see derive_key)")


def _signed(constant: int) -> int:
    """`constant` modulo 2**32 in [-2**31, 2**31): an int32, whose product with a value below 2**32 fits in int64."""
    return constant - 2**32 if constant >= 2**31 else constant


def _mix_(x: Tensor) -> Tensor:
    """The finaliser, in place, on int64 values in [0, 2**32)."""
    x.bitwise_xor_(x >> 16).mul_(_signed(0x21F0AAAD)).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).mul_(_signed(0xD35A2D97)).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 15)


def _mix32_(x: Tensor) -> Tensor:
    """The finaliser, in place, on int32 words; products wrap, and right shifts get zeros for the sign."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x21F0AAAD))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0xD35A2D97))
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
