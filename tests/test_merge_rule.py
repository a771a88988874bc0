"""The merge rules: ties are nudged by one ulp, and rounding to 24 bits is unbiased, exactly and over versions."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from logra.errors import ConfigError
from logra.hashing import element_words
from logra.merge_rule import LIMIT24, MergeRule, nudge_ties, round24_
from logra.storage import on_grid24

LIMIT_BITS = 0x7F7F8000


def from_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def bits_of(value: Tensor) -> np.ndarray:
    return value.contiguous().numpy().view(np.uint32)


def test_nudge_moves_ties_only_and_by_one_ulp():
    # Catches a tie that moves to the other bf16 number, and a neighbour of a tie that moves too.
    uppers = np.concatenate([np.arange(0, 0x7F7F, 37), [0, 1, 0x7F, 0x80, 0x7F7E]]).astype(np.uint32)
    uppers = np.concatenate([uppers, uppers | 0x8000])
    bits = (uppers[:, None] << 16 | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)).ravel()
    tie, odd = (bits & 0xFFFF) == 0x8000, (bits >> 16 & 1) == 1
    expected = np.where(tie & odd, bits + 1, np.where(tie, bits - 1, bits))
    value = from_bits(bits)
    np.testing.assert_array_equal(bits_of(nudge_ties(value)), expected)
    assert torch.equal(nudge_ties(nudge_ties(value)), nudge_ties(value))
    assert torch.equal(nudge_ties(value).bfloat16(), value.bfloat16())


# Zeros and denormals, the carry into the first normal binade, a carry into a binade, odd and even, the last finite one.
@pytest.mark.parametrize("upper", [0x0000, 0x007F, 0x3F80, 0x3F81, 0x3FFF, 0x7F7E, 0x8000, 0x807F, 0xBF80, 0xFF7E])
def test_rounding_to_24_bits_is_unbiased_over_all_words(upper):
    # Every low byte, under middle bytes around ties and carries, with each of the 2^9 words that matter. The mean of the
    # results is the value, exactly: 2^9 numbers of a binade add up in float64 without rounding. Catches noise of seven or
    # eight values too many, a tie that always moves the same way, and magnitudes mistaken for signed values.
    middle = np.array([0x00, 0x01, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF])
    bits = (upper << 16 | middle[:, None] << 8 | np.arange(256)).ravel()
    value = from_bits(bits)[:, None].expand(-1, 512).clone()
    words = torch.arange(512, dtype=torch.int32).expand(len(bits), -1) + (torch.arange(len(bits)).int() << 9)[:, None]
    rounded = value.clone()
    round24_(rounded, words.clone())
    assert on_grid24(rounded)
    assert torch.equal(rounded.double().mean(1), value[:, 0].double())
    # To a neighbour on the grid, and only there: values on the grid stay.
    steps = np.abs(bits_of(rounded).astype(np.int64) - bits[:, None])
    around_tie = (bits & 0xFFFF > 0x7F00) & (bits & 0xFFFF < 0x8100)
    assert (steps < np.where(around_tie, 512, 256)[:, None]).all()
    stays = (bits & 0xFF == 0) & (bits & 0xFFFF != 0x8000)
    assert (steps[stays] == 0).all()
    # hi of the rounded value is its round-to-nearest whatever becomes of ties: there is none.
    assert torch.equal(rounded.bfloat16().float(), from_bits((bits_of(rounded).astype(np.int64) + 0x8000) & 0xFFFF0000))


def test_rounding_follows_the_formula_over_versions():
    # The share of versions that round up is d / 2^8, or d / 2^9 around a tie; 5 sigma of a binomial. Catches noise that is
    # the same in every version, or correlated between neighbours (the sum over elements has its own bound).
    lower = np.array([0x3F800000, 0x3F807F00, 0xC0A37F00, 0x00007F00, 0x80801200])
    gap = np.array([256, 512, 512, 512, 256])
    distance = np.array([100, 300, 7, 500, 255])
    num_versions, copies = 400, 50
    value = from_bits((lower + distance).repeat(copies)).view(len(lower), copies)
    ups = np.zeros((num_versions, len(lower), copies))
    for version in range(num_versions):
        rounded = value.clone()
        rule = MergeRule.of("split24", seed=5, version=version, name="layers.0.q_proj.weight")
        rule.settle_(rounded, (len(lower), copies), (0, len(lower)), (0, copies))
        moved = bits_of(rounded).astype(np.int64) - lower[:, None]
        assert ((moved == 0) | (moved == gap[:, None])).all()
        ups[version] = moved > 0
    p = distance / gap
    sigma = np.sqrt(p * (1 - p))
    count = num_versions * copies
    np.testing.assert_array_less(np.abs(ups.mean((0, 2)) - p), 5 * sigma / math.sqrt(count))
    for axis in (0, 2):  # as independent over versions, and over elements, as their variance says
        spread = ups.mean(axis).var(axis=0 if axis == 2 else 1)
        np.testing.assert_allclose(spread, sigma**2 / ups.shape[axis], rtol=6 * math.sqrt(2 / copies))


def test_the_stream_is_that_of_seed_version_and_name():
    def rounded(storage: str = "split24", **changed) -> Tensor:
        value = torch.full((4, 64), 1.0 + 100 * 2.0**-23)
        names = {"seed": 1, "version": 2, "name": "w"} | changed
        MergeRule.of(storage, **names).settle_(value, (4, 64), (0, 4), (0, 64))
        return value

    assert torch.equal(rounded(), rounded())
    for changed in ({"seed": 2}, {"version": 3}, {"name": "v"}):
        assert not torch.equal(rounded(), rounded(**changed))
    assert torch.equal(rounded("fp32"), torch.full((4, 64), 1.0 + 100 * 2.0**-23))


def test_other_weight_storages_are_refused():
    # Catches a name with a typing error that is merged as fp32, without rounding.
    for make in (MergeRule, lambda storage: MergeRule.of(storage, seed=0, version=1, name="w")):
        with pytest.raises(ConfigError, match=r"weight_storage is 'split16'; allowed are fp32, split32, split24"):
            make("split16")


def test_below_the_limit_nothing_becomes_infinite():
    # Catches a limit from which noise leads to a number that bf16 rounds to infinity, and one that leaves out a number.
    last = from_bits(np.array([LIMIT_BITS - 0x100]))
    assert torch.nextafter(last, torch.tensor(math.inf)).item() == LIMIT24
    rounded = last.expand(1000).clone().view(1, -1)
    round24_(rounded, element_words(1, 1, 1000))
    assert bool((rounded == last).all()) and bool(rounded.bfloat16().isfinite().all())


@pytest.mark.parametrize(("relative_step", "documented"), [(1e-4, 9e-6), (1e-5, 8.5e-6), (1e-6, 3.5e-6)])
def test_the_noise_is_as_large_as_the_page_on_memory_says(relative_step, documented):
    # Rounding a place f between two neighbours has the variance step^2 f (1 - f).
    shape, generator = (256, 256), torch.Generator().manual_seed(0)
    rule = MergeRule.of("split24", seed=0, version=1, name="w")
    whole = (shape, (0, shape[0]), (0, shape[1]))
    value = torch.randn(shape, generator=generator)
    rule.settle_(value, *whole)
    value -= relative_step * torch.randn(shape, generator=generator)
    exact = value.double()
    step = 2.0 ** (exact.abs().log2().floor() - 15)
    place = (exact.abs() / step) % 1
    expected = (step.square() * place * (1 - place)).sum().sqrt() / exact.norm()
    rule = MergeRule.of("split24", seed=0, version=2, name="w")
    rule.settle_(value, *whole)
    noise = ((value.double() - exact).norm() / exact.norm()).item()
    assert noise == pytest.approx(
        expected.item(), rel=0.02
    )  # 65,000 elements: 1/256 of the squares; ties add a percent
    assert noise == pytest.approx(documented, rel=0.06)
