"""The digest of weights against Python integers, and what it must not depend on."""

import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from logra.errors import LograError
from logra.hashing import derive_key, hash_words
from logra.merge_rule import nudge_ties
from logra.storage import split32
from logra.sync import module_layout
from logra.sync.digest import checksum, combine, total
from logra.sync.layout import Piece, canonical_weights, weights_digest

M = 2**64


def multiplier(side: str, index: int) -> int:
    low, high = hash_words(derive_key("weights digest", side), torch.tensor([2 * index, 2 * index + 1])).tolist()
    return (low + 2**32 * high) | 1


def reference(matrix: torch.Tensor, row_start: int = 0, column_start: int = 0) -> int:
    bits = matrix.contiguous().numpy().view(np.int32).astype(object)
    result = 0
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            result += multiplier("row", row_start + i) * multiplier("column", column_start + j) * int(bits[i, j])
    return result % M


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32)
    return bits.view(torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 2), (0, 4), (4, 0)])
def test_the_checksum_is_the_documented_sum(shape):
    # Catches an overflow that does not wrap, an unsigned reading of the bits, and rows taken for columns.
    matrix = random_matrix(*shape)
    assert checksum(matrix) == reference(matrix)
    assert checksum(matrix, 11, 2**33) == reference(matrix, 11, 2**33)


@given(cut_row=st.integers(0, 9), cut_column=st.integers(0, 13), seed=st.integers(0, 100))
def test_parts_add_up_to_the_whole(cut_row, cut_column, seed):
    # Catches a shard that numbers its rows or columns from 0.
    matrix = random_matrix(9, 13, seed)
    parts = [
        checksum(matrix[rows, columns], rows.start, columns.start)
        for rows in (slice(0, cut_row), slice(cut_row, 9))
        for columns in (slice(0, cut_column), slice(cut_column, 13))
    ]
    assert total(parts) == checksum(matrix)


@given(i=st.integers(0, 5), j=st.integers(0, 6), bit=st.integers(0, 31))
def test_every_bit_counts(i, j, bit):
    matrix = random_matrix(6, 7)
    damaged = matrix.clone()
    mask = torch.from_numpy(np.array([1 << bit], dtype=np.uint32).view(np.int32))
    damaged.view(torch.int32)[i, j] ^= mask[0]
    assert checksum(damaged) != checksum(matrix)


def test_exchanges_are_seen():
    # Catches a sum without weights: two rows, columns or elements that change places.
    matrix = random_matrix(6, 7)
    values = {checksum(matrix), checksum(matrix[[1, 0, 2, 3, 4, 5]]), checksum(matrix[:, [0, 1, 3, 2, 4, 5, 6]])}
    swapped = matrix.clone()
    swapped[0, 0], swapped[3, 4] = matrix[3, 4], matrix[0, 0]
    assert len(values | {checksum(swapped)}) == 4
    # Signs of two elements: the change is 2^31 times a sum of two multipliers.
    signs = matrix.clone()
    signs[0, 0], signs[1, 5] = -signs[0, 0], -signs[1, 5]
    assert checksum(signs) != checksum(matrix)


def test_the_digest_is_the_documented_hash():
    model = nn.Linear(5, 3)
    layout = module_layout(model)
    expected = hashlib.sha256(b"LOGRAWTS")
    bias = checksum(model.bias.detach()[:, None])
    expected.update(struct.pack("<I", 4) + b"bias" + struct.pack("<IQQ", 1, 3, bias))
    expected.update(struct.pack("<I", 6) + b"weight" + struct.pack("<IQQQ", 2, 3, 5, checksum(model.weight.detach())))
    assert weights_digest(layout) == expected.hexdigest()
    assert combine({"bias": ((3,), bias), "weight": ((3, 5), checksum(model.weight.detach()))}) == expected.hexdigest()


def test_the_digest_sees_names_and_shapes():
    value = checksum(torch.zeros(2, 3))
    assert len({combine({"a": ((2, 3), value)}), combine({"b": ((2, 3), value)}), combine({"a": ((3, 2), value)})}) == 3


def test_threads_blocks_and_strides_do_not_matter():
    # Catches a result that depends on the order of summation. 2.1 M elements: several blocks and several threads.
    matrix = random_matrix(1500, 1400)
    piece = Piece(matrix, (0, 1500), (0, 1400))
    results = {piece.checksum(), checksum(matrix), checksum(matrix.T.contiguous().T)}
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        results.add(checksum(matrix))
    finally:
        torch.set_num_threads(num_threads)
    assert len(results) == 1


def test_storages_agree_where_the_values_do():
    # Catches a digest of the stored planes instead of the canonical value.
    value = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    value[0] = torch.from_numpy(((value[0].numpy().view(np.uint32) & 0xFFFF0000) | 0x8000).view(np.float32))
    ranges = ((0, 20), (0, 30))

    def piece(nudge: bool) -> Piece:
        high, low = split32(value, nudge=nudge)
        return Piece(high, *ranges, low)

    assert piece(nudge=False).checksum() == Piece(value, *ranges).checksum()
    assert (
        piece(nudge=True).checksum() == Piece(nudge_ties(value), *ranges).checksum() != Piece(value, *ranges).checksum()
    )
    half = value.to(torch.bfloat16)
    assert Piece(half, *ranges).checksum() == Piece(half.float(), *ranges).checksum()
    assert Piece(value, *ranges).checksum(rounded=True) == Piece(half, *ranges).checksum()


def test_only_fp32_matrices_have_a_checksum():
    for bad in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.bfloat16)):
        with pytest.raises(LograError, match="checksum"):
            checksum(bad)


def test_canonical_weights_have_the_shapes_of_the_module():
    model = nn.Conv1d(3, 4, 2)
    weights = canonical_weights(module_layout(model))
    assert torch.equal(weights["weight"], model.weight)
    assert weights["bias"].shape == (4,)
