"""The hash streams against a numpy reference in wrapping uint32 arithmetic, their slices and their statistics."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra.errors import LograError
from logra.hashing import check_range, derive_key, element_words, hash_words, signs, uniform

KEY = derive_key("test", 7)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference_words(key: int, index: np.ndarray) -> np.ndarray:
    """hash_words with the wrap-around of uint32 instead of masks on int64."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
        return x ^ (x >> np.uint32(15))

    low = (index & 0xFFFFFFFF).astype(np.uint32)
    high = (index >> 32).astype(np.uint32)
    encoded_key = b"i" + len(str(key)).to_bytes(8, "little") + str(key).encode()
    key = int.from_bytes(hashlib.sha256(encoded_key).digest()[:8], "little")
    inner = mix(low ^ np.uint32(key & 0xFFFFFFFF))
    return mix(inner ^ (high * np.uint32(0x9E3779B9) + np.uint32(key >> 32)))


def reference_signs(key: int, num_rows: int, width: int) -> np.ndarray:
    words_per_row = -(-width // 32)
    row, col = np.meshgrid(np.arange(num_rows), np.arange(width), indexing="ij")
    words = reference_words(key, row * words_per_row + col // 32)
    bit = (words >> (col % 32).astype(np.uint32)) & np.uint32(1)
    return bit.astype(np.float32) * 2 - 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", [0, 1, 2**32, 2**64 - 1, 0x80000000_80000000, KEY])
def test_hash_words_equal_the_uint32_reference(key, device):
    # Catches an int64 product that overflows, a missing mask, and a half of the key or of the index that is ignored.
    start = np.array([0, 2**31 - 50, 2**32 - 50, 2**40 - 50, 2**62, 2**63 - 100])
    index = (start[:, None] + np.arange(100)).ravel()
    words = hash_words(key, torch.from_numpy(index).to(device)).cpu().numpy()
    np.testing.assert_array_equal(words, reference_words(key, index).astype(np.int64))


def test_hash_words_leaves_the_index_unchanged():
    # Catches an in-place operation that reaches the caller's tensor.
    index = torch.arange(10)
    hash_words(KEY, index)
    assert torch.equal(index, torch.arange(10))


def test_the_stream_is_pinned():
    # Catches any change of the stream: old logs and packets would silently replay to other weights.
    assert derive_key("projection", 0, 1, "model.layers.0.self_attn", "in", 64) == 0xD5ECED776EE60853
    index = torch.tensor([0, 1, 2**32, 2**40 + 5])
    assert hash_words(0x0123456789ABCDEF, index).tolist() == [1442469044, 2189324130, 2185382072, 239350290]
    assert signs(KEY, 1, 8)[0].tolist() == [-1, -1, -1, 1, 1, 1, 1, 1]
    assert (uniform(KEY, 1, 3)[0] * 2**24).tolist() == [14048256, 3547657, 376110]


def test_derive_key_separates_what_a_plain_join_would_merge():
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), (1,), ("1",), (12,), (1, 2), (-1,), ("",), ("", "")]
    keys = {derive_key(*part) for part in parts}
    assert len(keys) == len(parts)
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("parts", [(), (1.0,), (None,), (True,), (b"a",)])
def test_derive_key_refuses_other_parts(parts):
    with pytest.raises(LograError, match="derive_key"):
        derive_key(*parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 31), (3, 32), (3, 33), (5, 200)])
def test_signs_equal_the_reference(num_rows, width, device):
    # Catches a wrong bit order, the highest bit lost to the sign of int32, and words shared by two rows.
    result = signs(KEY, num_rows, width, device=device)
    assert result.dtype == torch.float32
    np.testing.assert_array_equal(result.cpu().numpy(), reference_signs(KEY, num_rows, width))
    assert torch.equal(signs(KEY, num_rows, width, dtype=torch.int8), result.cpu().to(torch.int8))


@pytest.mark.parametrize("device", DEVICES)
def test_uniform_equals_the_reference(device):
    words = reference_words(KEY, np.arange(7 * 45)).reshape(7, 45)
    result = uniform(KEY, 7, 45, device=device)
    assert result.dtype == torch.float32
    np.testing.assert_array_equal(result.cpu().numpy().astype(np.float64), (words >> 8) / 2.0**24)
    assert result.max() < 1.0


@given(
    num_rows=st.integers(1, 9),
    width=st.integers(1, 140),
    data=st.data(),
    generate=st.sampled_from([signs, uniform]),
)
def test_slices_equal_the_slice_of_the_whole(num_rows, width, data, generate):
    # Catches a shard that starts counting at its own origin, at any offset inside a 32-bit word.
    rows = sorted(data.draw(st.tuples(st.integers(0, num_rows), st.integers(0, num_rows))))
    columns = sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width))))
    whole = generate(KEY, num_rows, width)
    part = generate(KEY, num_rows, width, rows=tuple(rows), columns=tuple(columns))
    assert torch.equal(part, whole[slice(*rows), slice(*columns)])
    assert part.is_contiguous()


def test_more_rows_extend_fewer_rows():
    # Catches a stream that depends on the rank: nested ranks must share their rows.
    assert torch.equal(signs(KEY, 16, 100)[:4], signs(KEY, 4, 100))


def test_rows_beyond_2_to_the_32_words_are_fresh():
    # Catches an index that is cut to 32 bits: row 2^31 of width 64 starts at word 2^32 and must not repeat row 0.
    num_rows = 2**31 + 4
    high = signs(KEY, num_rows, 64, rows=(2**31, num_rows))
    np.testing.assert_array_equal(high.numpy(), reference_signs_rows(KEY, np.arange(2**31, num_rows), 64))
    assert not torch.equal(high, signs(KEY, num_rows, 64, rows=(0, 4)))


def reference_signs_rows(key: int, rows: np.ndarray, width: int) -> np.ndarray:
    words_per_row = -(-width // 32)
    words = reference_words(key, rows[:, None] * words_per_row + np.arange(width) // 32)
    return ((words >> (np.arange(width) % 32).astype(np.uint32)) & np.uint32(1)).astype(np.float32) * 2 - 1


def assert_uncorrelated(matrix: torch.Tensor, what: str) -> None:
    """Mean of every row and every pair of rows [n, width] of unit-variance values within 5 sigma of zero.

    With n(n+1)/2 < 10^4 such numbers a true 5-sigma event has probability below 0.6 %; the streams are fixed, so the
    test either passes always or never. The root mean square over all pairs is bounded as well: a weak correlation that
    is spread over all pairs shows there first.
    """
    width = matrix.shape[1]
    matrix = matrix.double()
    assert matrix.mean(1).abs().max() < 5 / math.sqrt(width), what
    gram = (matrix @ matrix.T) / width
    pairs = gram[torch.triu_indices(len(gram), len(gram), 1).unbind()]
    assert pairs.abs().max() < 5 / math.sqrt(width), what
    relative = float(pairs.pow(2).mean().sqrt()) * math.sqrt(width)
    assert abs(relative - 1) < 5 / math.sqrt(2 * len(pairs)), what


def test_sign_statistics_within_one_matrix():
    assert_uncorrelated(signs(KEY, 128, 4096), "rows of one matrix")
    assert_uncorrelated(signs(KEY, 4096, 96).T, "columns of one matrix")


def test_sign_statistics_across_streams():
    # Catches keys whose streams are shifted copies of one another: neighbouring updates, seeds, names and sides.
    def flat(*parts: int | str) -> torch.Tensor:
        return signs(derive_key("projection", *parts), 8, 1024).flatten()

    assert_uncorrelated(torch.stack([flat(0, i, "a", "in") for i in range(64)]), "update indices")
    assert_uncorrelated(torch.stack([flat(i, 0, "a", "in") for i in range(64)]), "seeds")
    assert_uncorrelated(torch.stack([flat(0, 0, f"layers.{i}", s) for i in range(32) for s in ("in", "out")]), "names")
    raw = torch.stack([signs(key, 8, 1024).flatten() for key in [*range(32), *(i << 32 for i in range(1, 33))]])
    assert_uncorrelated(raw, "keys that differ in a few bits")


def test_uniform_statistics():
    # A uniform number has mean 1/2 and variance 1/12; sigmas of the estimates over n numbers are used as tolerances.
    sample = uniform(KEY, 128, 4096).double()
    n = sample.numel()
    assert abs(sample.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(sample.var() - 1 / 12) < 5 * math.sqrt((1 / 80 - 1 / 144) / n)
    assert_uncorrelated((sample - 0.5) * math.sqrt(12), "rows of uniform")
    counts = torch.histc(sample.float(), bins=256, min=0, max=1)
    chi_square = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("width", [1, 7, 2**31 + 5, 2**32 - 3, 2**33])
def test_words_of_elements_are_those_of_their_index(width):
    # Catches a sign that is shifted in, an overflow that does not wrap, and a high half of the index that is forgotten
    # (a row that begins below 2^32 and ends above) or taken of the first element of the slice.
    for rows in [(0, 5), (2, 4), (3, 3)]:
        columns = (max(0, width - 6), width)
        index = torch.arange(*rows)[:, None] * width + torch.arange(*columns)
        expected = hash_words(KEY, index).numpy().astype(np.uint32).view(np.int32)
        found = element_words(KEY, 5, width, rows=rows, columns=columns)
        assert found.dtype == torch.int32
        np.testing.assert_array_equal(found.numpy(), expected)


def obvious_uniform(key: int, width: int, rows: range, columns: range) -> torch.Tensor:
    """Element by element from 64-bit words, with a division that is exact."""
    index = torch.arange(rows.start, rows.stop)[:, None] * width + torch.arange(columns.start, columns.stop)
    return (hash_words(key, index) // 2**8).double().div(2**24).float()


@given(
    key=st.integers(0, 2**64 - 1),
    width=st.one_of(st.integers(1, 200), st.integers(2**31 - 100, 2**33)),
    first=st.integers(0, 2**20),
    data=st.data(),
)
def test_uniform_has_the_bits_of_the_64_bit_words(key, width, first, data):
    # Catches a sign that is shifted in (half of all numbers), and rows that begin below 2^32 and end above.
    rows = range(first, first + data.draw(st.integers(0, 5)))
    start = data.draw(st.integers(0, width))
    columns = range(start, min(width, start + data.draw(st.integers(0, 40))))
    bounds = {"rows": (rows.start, rows.stop), "columns": (columns.start, columns.stop)}
    found = uniform(key, 2**20 + 10, width, **bounds)
    expected = obvious_uniform(key, width, rows, columns)
    assert found.shape == (len(rows), len(columns)) and found.is_contiguous()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_bad_input_is_refused():
    with pytest.raises(LograError, match="int64"):
        hash_words(KEY, torch.arange(3, dtype=torch.int32))
    with pytest.raises(LograError, match="key is -1"):
        hash_words(-1, torch.arange(3))
    for generate in (uniform, element_words):
        with pytest.raises(LograError, match="key is 18446744073709551616"):
            generate(2**64, 3, 5)
    with pytest.raises(LograError, match=r"rows is \(0, 4\)"):
        signs(KEY, 3, 5, rows=(0, 4))
    with pytest.raises(LograError, match=r"columns is \(-1, 2\)"):
        uniform(KEY, 3, 5, columns=(-1, 2))
    with pytest.raises(LograError, match="allowed is 0 <= start <= stop <= 3"):
        check_range("rows", (2, 1), 3)
    assert check_range("rows", None, 3) == (0, 3)
