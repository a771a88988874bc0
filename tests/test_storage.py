"""The low planes of 16 and 8 bits against numpy bit arithmetic and torch's own rounding, and merging against fp32 storage."""

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logra.errors import LograError, PacketError
from logra.hashing import derive_key, hash_words
from logra.merge_rule import MergeRule, nudge_ties
from logra.storage import apply_update_, join, on_grid24, split24, split32
from logra.update import LowRankUpdate, SignFactor, round_factors

LIMIT_BITS = 0x7F7F8000  # the tie between the largest bf16 number and infinity


def sampled_values() -> Tensor:
    """fp32 numbers over all 2^32 bit patterns: a stride coprime to 2^16, and each special low half under many uppers."""
    strided = np.arange(0, 2**32, 1021, dtype=np.uint64)
    uppers = np.concatenate([np.arange(0, 2**16, 37), [0, 1, 0x7F, 0x80, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0xFF7F]])
    lowers = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF])
    special = (uppers[:, None] * 2**16 + lowers).ravel().astype(np.uint64)
    bits = np.concatenate([strided, special])
    bits = bits[(bits & 0x7FFFFFFF) < LIMIT_BITS]
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def bits_of(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().numpy().view(np.uint32)


def reference_nudge(bits: np.ndarray) -> np.ndarray:
    tie = (bits & 0xFFFF) == 0x8000
    upper_is_odd = ((bits >> 16) & 1) == 1
    return np.where(tie & upper_is_odd, bits + 1, np.where(tie, bits - 1, bits)).astype(np.uint32)


def test_join_of_split_is_exact_over_all_bit_patterns():
    # Catches a lost carry into the upper half, the sign of zero, denormals flushed to zero, and any low half but the tie.
    value = sampled_values()
    assert len(value) > 4_000_000
    hi, lo = split32(value)
    assert hi.dtype == torch.bfloat16
    assert lo.dtype == torch.int16
    np.testing.assert_array_equal(bits_of(join(hi, lo)), reference_nudge(bits_of(value)))


def test_hi_is_round_to_nearest_even_of_the_value():
    # Catches truncation, and a nudge that moves a tie to the other bf16 number: forward must see the rounded weight.
    value = sampled_values()
    hi, lo = split32(value)
    assert torch.equal(hi.view(torch.int16), value.to(torch.bfloat16).view(torch.int16))
    assert int(lo.min()) == -0x7FFF
    assert int(lo.max()) == 0x7FFF
    low_half = (bits_of(nudge_ties(value)) & 0xFFFF).astype(np.uint16).view(np.int16)
    np.testing.assert_array_equal(lo.numpy(), low_half)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
def test_split_and_join_on_arbitrary_bits(bits):
    patterns = np.array([b for b in bits if (b & 0x7FFFFFFF) < LIMIT_BITS], dtype=np.uint32)
    value = torch.from_numpy(patterns.view(np.float32))
    np.testing.assert_array_equal(bits_of(join(*split32(value))), reference_nudge(patterns))


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF, LIMIT_BITS])
def test_values_that_are_not_finite_in_bf16_are_refused(bits):
    # Catches a check after the integer arithmetic: the NaN 0xFFFFFFFF plus 0x8000 wraps around to an ordinary number.
    value = torch.from_numpy(np.array([0x3F800000, bits], dtype=np.uint32).view(np.float32))
    with pytest.raises(LograError, match="not finite"):
        split32(value)


def test_without_the_nudge_every_value_is_held():
    # Catches ties that move: a split32 copy of weights that are trained in fp32 must keep them.
    value = sampled_values()
    hi, lo = split32(value, nudge=False)
    np.testing.assert_array_equal(bits_of(join(hi, lo)), bits_of(value))
    # Ties go away from zero, everything else to the nearest as before.
    tie = torch.from_numpy((bits_of(value) & 0xFFFF) == 0x8000)
    assert torch.equal(hi[~tie].view(torch.int16), value[~tie].to(torch.bfloat16).view(torch.int16))
    assert bool((lo[tie] == -0x8000).all())
    assert bool((hi[tie].float().abs() > value[tie].abs()).all())


def test_split24_holds_every_value_of_24_bits_but_ties():
    # Every one of the 2^24 patterns: both signs, zeros, denormals, carries into the exponent, the largest finite numbers.
    # Catches a hi that is truncated, a carry lost or doubled, and a low byte read with the wrong sign.
    bits = np.arange(2**24, dtype=np.uint32) << 8
    held = ((bits & 0xFFFF) != 0x8000) & ((bits & 0x7FFFFFFF) < LIMIT_BITS)
    assert held.sum() == 2 * (0x7F7F80 - 0x7F7F)  # of either sign, below the first that is not finite in bf16, no ties
    value = torch.from_numpy(bits[held].view(np.float32))
    hi, lo = split24(value)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int8)
    assert torch.equal(hi.view(torch.int16), value.to(torch.bfloat16).view(torch.int16))
    np.testing.assert_array_equal(lo.numpy(), (bits[held] >> 8 & 0xFF).astype(np.uint8).view(np.int8))
    assert (int(lo.min()), int(lo.max())) == (-127, 127)
    np.testing.assert_array_equal(bits_of(join(hi, lo)), bits[held])


@pytest.mark.parametrize("bits", [0x3F800001, 0x3F800080, 0x3F8000FF, 0x3F808000, 0xBF818000, 0x00008000, 0x80000001])
def test_split24_refuses_what_its_planes_do_not_hold(bits):
    # Catches a silent rounding, and the tie, whose low byte of -128 would read as the one of the number above it.
    value = torch.from_numpy(np.array([0x3F800000, bits], dtype=np.uint32).view(np.float32))
    assert not on_grid24(value)
    with pytest.raises(LograError, match="split24: value"):
        split24(value)


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7F8100])
def test_split24_refuses_what_is_not_finite_in_bf16(bits):
    value = torch.from_numpy(np.array([0x3F800000, bits], dtype=np.uint32).view(np.float32))
    with pytest.raises(LograError, match="not finite"):
        split24(value)


def random_update(
    seed: int, shape: tuple[int, int], sign_side: Literal["in", "out"] | None = None, decay: float = 1.0
) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(seed)
    out_factor = torch.randn(shape[0], 6, generator=generator) * 1e-3
    in_factor = torch.randn(6, shape[1], generator=generator)
    return round_factors(
        None if sign_side == "out" else out_factor,
        None if sign_side == "in" else in_factor,
        signs=None if sign_side is None else SignFactor(seed, 0, "n", sign_side),
        shape=shape,
        factor_bits=4 if seed % 2 else 8,
        key=derive_key("test", seed),
        decay=decay,
    )


@pytest.mark.parametrize("decay", [1.0, 0.999])
def test_split32_training_equals_fp32_storage_bit_for_bit(decay):
    # Catches any loss between the planes over a run. Starts at ties, so that the nudge rule acts.
    shape = (37, 29)
    initial = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    initial[::2] = torch.from_numpy(((bits_of(initial[::2]) & 0xFFFF0000) | 0x8000).view(np.float32))
    parameter, lo = split32(initial)
    weight = nudge_ties(initial)
    num_ties = 0
    for step in range(50):
        update = random_update(step, shape, decay=decay)
        apply_update_(update, parameter, lo, block_rows=1 + step % 40)
        apply_update_(update, weight, block_rows=40 - step % 40)
        num_ties += int(((bits_of(weight) & 0xFFFF) == 0x8000).sum())
        weight = nudge_ties(weight)
        assert torch.equal(join(parameter, lo), weight), step
        assert torch.equal(parameter, weight.to(torch.bfloat16)), step
    assert num_ties > 0 or decay == 1.0


@pytest.mark.parametrize("nudge", [True, False])
def test_either_storage_follows_either_merge_rule(nudge):
    # Catches a merge rule that follows the storage of the copy instead of that of the run.
    shape = (37, 29)
    initial = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    initial[::2] = torch.from_numpy(((bits_of(initial[::2]) & 0xFFFF0000) | 0x8000).view(np.float32))
    initial = nudge_ties(initial) if nudge else initial
    expected, plain = initial.clone(), initial.clone()
    parameter, lo = split32(initial, nudge=False)
    rule = MergeRule("split32" if nudge else "fp32")
    for step in range(30):
        update = random_update(step, shape, decay=0.999 if step % 2 else 1.0)
        expected = expected * np.float32(update.decay) - update.dense()
        expected = nudge_ties(expected) if nudge else expected
        apply_update_(update, plain, rule=rule, block_rows=7)
        apply_update_(update, parameter, lo, rule=rule, block_rows=5)
        assert torch.equal(plain, expected), step
        assert torch.equal(join(parameter, lo), expected), step


def planes_of(value: Tensor, storage: str) -> tuple[Tensor, Tensor | None]:
    if storage == "fp32":
        return value.clone(), None
    return split24(value) if storage == "split24" else split32(value, nudge=False)


def value_of(parameter: Tensor, lo: Tensor | None) -> Tensor:
    return parameter if lo is None else join(parameter, lo)


@pytest.mark.parametrize("storage", ["fp32", "split32", "split24"])
def test_every_plane_follows_the_rule_of_split24(storage):
    # The slow trainer: numpy bits, words of `hash_words` by the index of the element. Catches noise that depends on the
    # slice, the block or the strides, noise of another version, rounding before the subtraction, and a tie left behind.
    shape = (37, 29)
    expected = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    parts = {
        (rows, columns): planes_of(expected[slice(*rows), slice(*columns)], storage)
        for rows in [(0, 11), (11, 37)]
        for columns in [(0, 5), (5, 29)]
    }
    transposed, transposed_lo = (None if p is None else p.T.contiguous() for p in planes_of(expected, storage))
    assert transposed is not None
    index = torch.arange(37 * 29).view(shape)
    num_ties = 0
    for step in range(30):
        update = random_update(step, shape, decay=0.999 if step % 2 else 1.0)
        rule = MergeRule.of("split24", seed=3, version=step + 1, name="w")
        merged = (expected * np.float32(update.decay) - update.dense()).numpy()
        words = hash_words(derive_key("split24", 3, step + 1, "w"), index).numpy()
        bits = (merged.view(np.uint32).astype(np.int64) + words % 256) // 256 * 256
        tie = bits % 65536 == 0x8000
        bits += tie * np.where(words >> 8 & 1, 256, -256)
        num_ties += int(tie.sum())
        expected = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
        for (rows, columns), (parameter, lo) in parts.items():
            apply_update_(update, parameter, lo, rows=rows, columns=columns, block_rows=1 + step % 12, rule=rule)
            assert torch.equal(value_of(parameter, lo), expected[slice(*rows), slice(*columns)]), step
        low = None if transposed_lo is None else transposed_lo.T
        apply_update_(update, transposed.T, low, rule=rule)
        assert torch.equal(value_of(transposed.T, low), expected), step
        if storage != "fp32":
            assert torch.equal(transposed.T, expected.to(torch.bfloat16)), step
    assert num_ties > 50


def test_planes_of_8_bits_need_the_rule_of_split24():
    # Catches a rounding without noise, or without the run's noise, that nobody asked for.
    update = random_update(1, (30, 22))
    hi, lo = split24(torch.ones(30, 22))
    for rule in (None, MergeRule("fp32"), MergeRule("split32")):
        with pytest.raises(PacketError, match=r"needs torch\.bfloat16 and torch\.int16"):
            apply_update_(update, hi, lo, rule=rule)
    assert torch.equal(hi, torch.ones_like(hi))
    # Finite in bf16, and half a step below what is not.
    huge = torch.from_numpy(np.full((30, 22), LIMIT_BITS - 0x80, dtype=np.uint32).view(np.float32))
    with pytest.raises(LograError, match="not finite"):
        apply_update_(update, *split32(huge), rule=MergeRule("split24"))


@pytest.mark.parametrize("sign_side", [None, "in", "out"])
def test_transposed_and_sharded_planes_give_the_same_bits(sign_side):
    # Catches planes that are assumed contiguous, and shards that take the wrong slice of the update.
    update = random_update(1, (30, 22), sign_side, decay=0.99)
    initial = torch.randn(30, 22, generator=torch.Generator().manual_seed(0))
    expected = nudge_ties(initial)
    apply_update_(update, expected)
    expected = nudge_ties(expected)

    stored_transposed, lo_transposed = (plane.T.contiguous() for plane in split32(initial))
    apply_update_(update, stored_transposed.T, lo_transposed.T, block_rows=4)
    assert torch.equal(join(stored_transposed.T, lo_transposed.T), expected)

    for rows in [(0, 11), (11, 30)]:
        for columns in [(0, 5), (5, 22)]:
            parameter, lo = split32(initial[slice(*rows), slice(*columns)])
            apply_update_(update, parameter, lo, rows=rows, columns=columns, block_rows=3)
            assert torch.equal(join(parameter, lo), expected[slice(*rows), slice(*columns)])


def test_a_parameter_that_requires_grad_is_merged_in_place():
    # Catches a merge that replaces the tensor instead of writing into it: the module would keep the old weight.
    hi, lo = split32(torch.ones(30, 22))
    parameter = torch.nn.Parameter(hi)
    update = random_update(1, (30, 22))
    apply_update_(update, parameter, lo)
    expected = nudge_ties(1.0 - update.dense())
    assert torch.equal(join(parameter, lo), expected)


@pytest.mark.parametrize("storage", ["fp32", "split32", "split24"])
def test_the_peak_is_a_few_blocks(storage):
    # Catches a merge that materialises the whole weight: 4 MiB blocks, weight 48 MiB in fp32. The largest single
    # allocation is measured with a dispatch mode, which sees every tensor that an operator returns.
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargestResult(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not result._is_view() and "copy_" not in str(func):
                self.largest = max(self.largest, result.numel() * result.element_size())
            return result

    shape = (3072, 4096)
    update = random_update(1, shape)
    parameter, lo = planes_of(torch.zeros(shape), storage)
    rule = MergeRule.of("split24", seed=0, version=1, name="w") if storage == "split24" else None
    with LargestResult() as mode:
        apply_update_(update, parameter, lo, rule=rule)
    assert 0 < mode.largest <= 8 * 2**20


def test_planes_that_do_not_fit_are_refused_before_anything_is_written():
    update = random_update(1, (30, 22))
    hi, lo = split32(torch.ones(30, 22))
    cases = [
        (hi, None, {}),
        (hi.float(), lo, {}),
        (hi, lo.int(), {}),
        (hi[:5], lo, {}),
        (hi, lo[:5], {}),
        (hi, lo, {"rows": (0, 5)}),
        (hi.T, lo.T, {}),
    ]
    for parameter, plane, slices in cases:
        with pytest.raises(PacketError, match="needs torch"):
            apply_update_(update, parameter, plane, **slices)
    with pytest.raises(LograError, match=r"rows is \(5, 35\)"):
        apply_update_(update, hi, lo, rows=(5, 35))
    assert torch.equal(hi, torch.ones_like(hi))
    assert torch.equal(lo, torch.zeros_like(lo))
    with pytest.raises(LograError, match="join"):
        join(hi.float(), lo)
    with pytest.raises(LograError, match="split32"):
        split32(hi)
