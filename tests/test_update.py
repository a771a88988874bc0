"""The rounded update against int64 and float64 arithmetic: exactness, slices, unbiased rounding, merging, refusals."""

import itertools
import math
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logra.errors import LograError, PacketError
from logra.hashing import derive_key
from logra.rounding import MAX_EXPONENT, MIN_EXPONENT, QMAX
from logra.update import LowRankUpdate, PolicyUpdate, SignFactor, round_factors, row_blocks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Side = Literal["in", "out"]
SIDES = [None, *get_args(Side)]


def random_update(
    seed: int,
    shape: tuple[int, int],
    rank: int,
    factor_bits: int = 8,
    sign_side: Side | None = None,
    decay: float = 1.0,
    extreme: bool = False,
    exponent_range: tuple[int, int] = (-20, 3),
) -> LowRankUpdate:
    """Uniform integers and exponents; with `extreme`, every integer is +-qmax, which maximises the partial sums."""
    generator = torch.Generator().manual_seed(seed)
    qmax = QMAX[factor_bits]

    def integers(*size: int) -> Tensor:
        if extreme:
            return (torch.randint(0, 2, size, generator=generator) * 2 - 1).mul(qmax).to(torch.int8)
        return torch.randint(-qmax, qmax + 1, size, generator=generator).to(torch.int8)

    def exponents(size: int) -> Tensor:
        return torch.randint(exponent_range[0], exponent_range[1] + 1, (size,), generator=generator).to(torch.int16)

    num_out, num_in = shape
    return LowRankUpdate(
        shape=shape,
        rank=rank,
        factor_bits=factor_bits,
        factor_out=None if sign_side == "out" else integers(num_out, rank),
        factor_in=None if sign_side == "in" else integers(rank, num_in),
        exponent_out=exponents(num_out),
        exponent_in=exponents(num_in),
        signs=None if sign_side is None else SignFactor(seed, 3, "layers.0", sign_side),
        decay=decay,
    )


def reference_dense(update: LowRankUpdate) -> Tensor:
    """dW in float64: int64 matrix product, then exact powers of two."""
    num_out, num_in = update.shape
    factor_out, factor_in = update.factor_out, update.factor_in
    if update.signs is not None and factor_out is None:
        factor_out = update.signs.matrix(update.rank, num_out)
    if update.signs is not None and factor_in is None:
        factor_in = update.signs.matrix(update.rank, num_in)
    assert factor_out is not None
    assert factor_in is not None
    product = factor_out.cpu().long() @ factor_in.cpu().long()
    exponent = update.exponent_out.cpu().long()[:, None] + update.exponent_in.cpu().long()
    return torch.from_numpy(np.ldexp(product.double().numpy(), exponent.numpy()))


updates = st.builds(
    random_update,
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rank=st.integers(1, 24),
    factor_bits=st.sampled_from([4, 8]),
    sign_side=st.sampled_from(SIDES),
    extreme=st.booleans(),
    exponent_range=st.sampled_from([(-20, 3), (MIN_EXPONENT, MIN_EXPONENT), (MAX_EXPONENT, MAX_EXPONENT), (-60, 50)]),
)


@given(update=updates)
def test_dense_is_exact(update):
    # Catches a product that rounds, a scale on the wrong axis, denormal or overflowing scales.
    dense = update.dense()
    assert dense.dtype == torch.float32
    assert torch.equal(dense.double(), reference_dense(update))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_dense_is_exact_at_the_largest_sums_and_any_matmul_precision(precision, device):
    # Rank 1024 of +-127 reaches sums up to 16,516,096 < 2^24. Catches a bound that is too loose, and TF32 or bf16.
    update = random_update(0, (70, 65), 1024, extreme=True)
    assert update.factor_out is not None
    update.factor_out[0] = 127
    assert update.factor_in is not None
    update.factor_in[:, 0] = 127
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        dense = update.to(device).dense().cpu()
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(dense.double(), reference_dense(update))
    assert dense[0, 0] == 127 * 127 * 1024 * 2.0 ** int(update.exponent_out[0] + update.exponent_in[0])


@pytest.mark.parametrize("device", DEVICES)
def test_dense_ignores_autocast(device):
    # Catches a product that autocast rounds to bf16.
    update = random_update(1, (30, 20), 16).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        dense = update.dense()
    assert torch.equal(dense.cpu().double(), reference_dense(update))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sign_side", SIDES)
@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_shards_equal_the_slice_of_the_whole(ways, sign_side, device):
    # Catches a shard that regenerates signs from its own origin or takes the wrong exponents; sizes divide unevenly.
    update = random_update(2, (101, 75), 20, sign_side=sign_side).to(device)
    whole = update.dense()
    row_edges = [101 * i // ways for i in range(ways + 1)]
    column_edges = [75 * i // ways for i in range(ways + 1)]
    for rows in itertools.pairwise(row_edges):
        assert torch.equal(update.dense(rows=rows), whole[slice(*rows)])
        for columns in itertools.pairwise(column_edges):
            assert torch.equal(update.dense(rows, columns), whole[slice(*rows), slice(*columns)])
            assert torch.equal(update.dense(columns=columns), whole[:, slice(*columns)])


@given(update=updates)
def test_delta_holds_the_same_change(update):
    # Catches scales that are folded into the wrong factor; float64 is exact here because all terms share one exponent.
    delta = update.delta()
    product = delta.out_factor.double() @ delta.in_factor.double()
    assert delta.out_factor.dtype == delta.in_factor.dtype == torch.float32
    assert delta.decay == update.decay
    assert torch.equal(product, reference_dense(update))


# ---- merging


def reference_merge(weight: Tensor, update: LowRankUpdate) -> Tensor:
    """fl(fl(W * decay) - dW) in numpy fp32, one rounding per operation; dW is exact in fp32."""
    change = reference_dense(update).numpy().astype(np.float32)
    return torch.from_numpy(weight.numpy() * np.float32(update.decay) - change)


@given(update=updates, decay=st.sampled_from([1.0, float(np.float32(0.999)), 0.5]), block_rows=st.integers(1, 50))
def test_apply_rounds_once_per_operation(update, decay, block_rows):
    # Catches a fused multiply-add, a change added instead of subtracted, decay after the subtraction, a lost last block.
    update = replace(update, decay=decay)
    weight = torch.randn(update.shape, generator=torch.Generator().manual_seed(0))
    expected = reference_merge(weight, update)
    update.apply_(weight, block_rows=block_rows)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sign_side", SIDES)
def test_apply_to_a_transposed_view_and_to_shards_gives_the_same_bits(sign_side, device):
    # Catches a merge that assumes contiguous rows, and shards that take the wrong slice of the update.
    update = random_update(3, (60, 44), 9, sign_side=sign_side, decay=float(np.float32(0.99)))
    weight = torch.randn(60, 44, generator=torch.Generator().manual_seed(1))
    expected = reference_merge(weight, update)
    stored_transposed = weight.T.contiguous().to(device)
    update.apply_(stored_transposed.T, block_rows=7)
    assert torch.equal(stored_transposed.T.cpu(), expected)
    for rows in [(0, 13), (13, 60)]:
        for columns in [(0, 31), (31, 44)]:
            shard = weight[slice(*rows), slice(*columns)].to(device, copy=True)
            update.apply_(shard, rows, columns, block_rows=5)
            assert torch.equal(shard.cpu(), expected[slice(*rows), slice(*columns)])


def test_apply_accepts_a_parameter_that_requires_grad():
    # Catches an in-place change outside no_grad, which autograd refuses for a leaf.
    update = random_update(4, (6, 5), 2)
    parameter = torch.nn.Parameter(torch.zeros(6, 5))
    update.apply_(parameter)
    assert torch.equal(parameter.detach(), -update.dense())
    assert not parameter.grad_fn


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(5, 6), r"\(5, 6\)"),
        (torch.zeros(6, 5, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(6), r"\(6,\)"),
    ],
)
def test_apply_refuses_weights_that_do_not_fit(weight, message):
    with pytest.raises(PacketError, match=message):
        random_update(4, (6, 5), 2).apply_(weight)


def test_blocks_cover_the_rows_and_stay_below_4_mib():
    assert list(row_blocks((10, 3), 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(row_blocks((0, 3))) == []
    for width in (1, 576, 8960, 2**21):
        blocks = list(row_blocks((1000, width)))
        assert blocks[0][0] == 0
        assert blocks[-1][1] == 1000
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(blocks))
        largest = max(stop - start for start, stop in blocks)
        assert largest == 1 or largest * width * 4 <= 4 * 2**20
    with pytest.raises(LograError, match="block_rows is 0"):
        list(row_blocks((10, 3), 0))


# ---- rounding of both factors


@pytest.mark.parametrize("factor_bits", [4, 8])
@pytest.mark.parametrize("sign_side", SIDES)
def test_the_product_is_unbiased(sign_side, factor_bits):
    # Mean of dense() over n keys against the float64 product. Tolerance: the standard error is measured from the same
    # draws; 5 sigma for each of 30 elements. Catches round-to-nearest, truncation, and one stream for both factors
    # (E[LR] != E[L]E[R]): the factors below sit where each of these gives an error far above the tolerance.
    num_keys = 4000
    generator = torch.Generator().manual_seed(0)
    out_factor = torch.rand(6, 4, generator=generator) + 0.1
    in_factor = torch.rand(4, 5, generator=generator) + 0.1
    out_factor[:, 0] = in_factor[0] = 1.9  # sets the scales, so the others lie at small fractions of a 4-bit step
    signs = None if sign_side is None else SignFactor(0, 0, "n", sign_side)
    given_out = None if sign_side == "out" else out_factor
    given_in = None if sign_side == "in" else in_factor
    exact_out = out_factor.double() if signs is None or given_out is not None else signs.matrix(4, 6).double()
    exact_in = in_factor.double() if signs is None or given_in is not None else signs.matrix(4, 5).double()
    draws = torch.stack(
        [
            round_factors(given_out, given_in, signs=signs, shape=(6, 5), factor_bits=factor_bits, key=key)
            .dense()
            .double()
            for key in range(num_keys)
        ]
    )
    error = (draws.mean(0) - exact_out @ exact_in).abs()
    assert (error <= 5 * draws.std(0) / math.sqrt(num_keys) + 1e-6).all()
    assert draws.std(0).max() > 0


def test_both_factors_have_independent_noise():
    # Catches one stream for both: with equal inputs the integers of L and R^T would agree everywhere.
    factor = torch.full((8, 8), 0.5)
    factor.fill_diagonal_(0.99)
    update = round_factors(factor, factor, factor_bits=4, key=1)
    assert update.factor_out is not None
    assert update.factor_in is not None
    assert not torch.equal(update.factor_out, update.factor_in)
    assert not torch.equal(update.factor_out, update.factor_in.T)
    again = round_factors(factor, factor, factor_bits=4, key=1)
    assert torch.equal(update.dense(), again.dense())
    assert not torch.equal(update.dense(), round_factors(factor, factor, factor_bits=4, key=2).dense())


def test_sign_side_keeps_its_exponents():
    # Catches input scaling that is dropped or applied to the wrong side.
    signs = SignFactor(1, 2, "a", "in")
    exponent_in = torch.tensor([-3, 0, 2, 5, -7], dtype=torch.int32)
    out_factor = (
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).clamp(-0.9, 0.9).mul(128).round().div(128)
    )
    out_factor[:, 0] = 127 / 128  # all elements are integers at scale 2^-7: nothing is left to rounding
    update = round_factors(out_factor, None, signs=signs, exponent_in=exponent_in, factor_bits=8, key=0, decay=0.9)
    expected = out_factor.double() @ signs.matrix(3, 5).double() * 2.0 ** exponent_in.double()
    assert torch.equal(update.dense().double(), expected)
    assert update.exponent_in.dtype == torch.int16
    assert update.decay == float(np.float32(0.9))


@pytest.mark.parametrize(("side", "shape"), [("in", (6, 50)), ("out", (50, 6))])
def test_sign_factor_orientation_and_slices(side, shape):
    # Catches a transposed slice: rows and columns refer to the matrix that is returned, on both sides.
    factor = SignFactor(0, 1, "layers.0", side)
    whole = factor.matrix(6, 50)
    assert tuple(whole.shape) == shape
    assert torch.equal(factor.matrix(6, 50, rows=(1, 5), columns=(2, 4)), whole[1:5, 2:4])


def test_sign_factor_key_names_everything():
    assert SignFactor(0, 1, "a", "in").key(50) == derive_key("projection", 0, 1, "a", "in", 50)
    keys = {SignFactor(0, 1, "a", "in").key(9), SignFactor(0, 1, "a", "in").key(8), SignFactor(1, 0, "a", "in").key(8)}
    keys |= {SignFactor(0, 1, "b", "in").key(8), SignFactor(0, 1, "a", "out").key(8)}
    assert len(keys) == 5
    with pytest.raises(LograError, match="'left'"):
        SignFactor(0, 1, "a", "left")  # pyright: ignore[reportArgumentType]


ONES = torch.ones(3, 2)
BAD_ROUNDING = {
    "nan": ({"out_factor": torch.full((3, 2), float("nan")), "in_factor": ONES.T}, "out_factor holds values"),
    "inf": ({"out_factor": ONES, "in_factor": torch.full((2, 3), float("inf"))}, "in_factor holds values"),
    "huge": ({"out_factor": ONES * 2.0**60, "in_factor": ONES.T}, "out_factor reaches"),
    "dtype": ({"out_factor": ONES.double(), "in_factor": ONES.T}, "float64"),
    "empty": ({"out_factor": torch.ones(0, 2), "in_factor": ONES.T}, r"\(0, 2\)"),
    "ranks": ({"out_factor": ONES, "in_factor": torch.ones(4, 3)}, "factor_in is"),
    "nothing": ({"out_factor": None, "in_factor": None}, "both None"),
    "no signs": ({"out_factor": ONES, "in_factor": None, "shape": (3, 4)}, "missing on sides"),
    "wrong side": (
        {"out_factor": ONES, "in_factor": None, "shape": (3, 4), "signs": SignFactor(0, 0, "", "out")},
        "missing on",
    ),
    "no width": ({"out_factor": ONES, "in_factor": None, "signs": SignFactor(0, 0, "", "in")}, "pass shape"),
    "shape": ({"out_factor": ONES, "in_factor": ONES.T, "shape": (3, 4)}, r"shape is \(3, 4\)"),
    "exponent": (
        {"out_factor": ONES, "in_factor": ONES.T, "exponent_in": torch.zeros(3)},
        "exponents are allowed only",
    ),
    "float exponent": (
        {"out_factor": ONES, "in_factor": None, "exponent_in": torch.zeros(3)},
        "exponent_in is torch.float32",
    ),
    "exponent range": (
        {
            "out_factor": ONES,
            "in_factor": None,
            "signs": SignFactor(0, 0, "", "in"),
            "exponent_in": torch.tensor([0, 2**16]),
        },
        "from 0 to 65536",
    ),
    "bits": ({"out_factor": ONES, "in_factor": ONES.T, "factor_bits": 3}, "factor_bits is 3"),
    "decay": ({"out_factor": ONES, "in_factor": ONES.T, "decay": 1.5}, "decay is 1.5"),
    "rank": ({"out_factor": torch.ones(1, 1025), "in_factor": torch.ones(1025, 1)}, "rank is 1025"),
}


@pytest.mark.parametrize("case", BAD_ROUNDING)
def test_round_factors_refuses(case):
    arguments, message = BAD_ROUNDING[case]
    with pytest.raises(LograError, match=message):
        round_factors(**{"factor_bits": 4, "key": 0, **arguments})


BAD_UPDATES = {
    "shape": ({"shape": (0, 5)}, r"shape is \(0, 5\)"),
    "rank": ({"rank": 0}, "rank is 0"),
    "bits": ({"factor_bits": 5}, "factor_bits is 5"),
    "range": ({"factor_out": torch.full((6, 2), -8, dtype=torch.int8)}, "from -8 to -8"),
    "int8 minimum": ({"factor_bits": 8, "factor_in": torch.full((2, 5), -128, dtype=torch.int8)}, "from -128"),
    "dtype": ({"factor_out": torch.zeros(6, 2)}, "float32"),
    "factor shape": ({"factor_in": torch.zeros(5, 2, dtype=torch.int8)}, r"\(5, 2\)"),
    "exponent low": ({"exponent_out": torch.full((6,), -61, dtype=torch.int16)}, "exponent_out has values from -61"),
    "exponent high": ({"exponent_in": torch.full((5,), 51, dtype=torch.int16)}, "to 51"),
    "decay not fp32": ({"decay": 0.1}, "decay is 0.1"),
    "decay zero": ({"decay": 0.0}, "decay is 0.0"),
    "decay nan": ({"decay": float("nan")}, "decay is nan"),
    "signs too many": ({"signs": SignFactor(0, 0, "", "in")}, "missing on sides"),
    "factor missing": ({"factor_in": None}, "missing on sides"),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_low_rank_update_refuses(case):
    arguments, message = BAD_UPDATES[case]
    valid = random_update(0, (6, 5), 2, factor_bits=4)
    with pytest.raises(LograError, match=message):
        replace(valid, **arguments)


def test_policy_update_refuses_gaps_and_double_names():
    # Catches a version jump that a replica would merge onto wrong weights.
    update = random_update(0, (6, 5), 2)
    with pytest.raises(LograError, match=r"version is 6; allowed is base_version \+ 1 = 5"):
        PolicyUpdate(4, 6, 0, 0, {})
    with pytest.raises(LograError, match="base_version is -1"):
        PolicyUpdate(-1, 0, 0, 0, {})
    with pytest.raises(LograError, match="seed is 9223372036854775808"):
        PolicyUpdate(0, 1, 2**63, 0, {})
    with pytest.raises(LograError, match="'a'"):
        PolicyUpdate(0, 1, 0, 0, {"a": update}, {"a": torch.zeros(1)})
