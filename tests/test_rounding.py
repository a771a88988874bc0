"""Stochastic rounding against its formula in float64, and the exactness of its scales."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra.hashing import uniform
from logra.rounding import MAX_EXPONENT, MIN_EXPONENT, QMAX, powers_of_two, round_slices

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_powers_of_two_are_exact(device):
    exponent = torch.arange(-126, 128, dtype=torch.int16, device=device)
    expected = torch.from_numpy(np.ldexp(1.0, np.arange(-126, 128)))
    assert torch.equal(powers_of_two(exponent).cpu().double(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor_bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_round_slices_equals_the_formula_in_float64(dim, factor_bits, device):
    # Catches log2 that rounds at powers of two, a wrong axis, and noise that is not the noise of the element.
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-9, 4, 40, base=10.0)[:, None]
    factor = torch.randn(40, 33, generator=generator) * scale
    qmax = QMAX[factor_bits]
    factor[3] = 0.0
    factor[5, :3] = torch.tensor([qmax * 0.25, -qmax * 0.25, 0.0])  # the largest is exactly representable
    factor[5, 3:] = 0.0
    if dim == 0:
        factor = factor.T.contiguous()
    integers, exponent = round_slices("x", factor.to(device), dim=dim, factor_bits=factor_bits, key=9)
    assert integers.dtype == torch.int8
    assert exponent.dtype == torch.int16
    x = factor.double().numpy()
    noise = uniform(9, *factor.shape).double().numpy()
    largest = np.abs(x).max(dim)
    expected_exponent = [min(e for e in range(-60, 60) if m <= qmax * 2.0**e) if m > 0 else 0 for m in largest]
    np.testing.assert_array_equal(exponent.cpu().numpy(), expected_exponent)
    magnitude = np.abs(x) / 2.0 ** np.expand_dims(np.array(expected_exponent), dim)
    # u < frac is the event u' = 1 - 2^-24 - u >= 1 - frac - 2^-24: the same distribution as floor(magnitude + u').
    expected = np.sign(x) * (np.floor(magnitude) + (noise < magnitude - np.floor(magnitude)))
    np.testing.assert_array_equal(integers.cpu().numpy(), expected)
    assert np.abs(expected).max() == qmax


@given(
    seed=st.integers(0, 10**6),
    factor_bits=st.sampled_from([4, 8]),
    power=st.integers(-140, 50),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_rounded_values_stay_in_range_and_next_to_the_factor(seed, factor_bits, power, shape):
    # Catches the integer qmax + 1 that floor(x + u) in fp32 gives, denormal scales, and rounding that skips a neighbour.
    factor = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3).double().mul(2.0**power).float()
    )
    integers, exponent = round_slices("x", factor, dim=1, factor_bits=factor_bits, key=seed)
    assert integers.abs().max() <= QMAX[factor_bits]
    assert int(exponent.min()) >= MIN_EXPONENT
    assert int(exponent.max()) <= MAX_EXPONENT
    step = torch.from_numpy(np.ldexp(1.0, exponent.numpy())).unsqueeze(1)
    assert ((integers.double() * step - factor.double()).abs() < step).all()
