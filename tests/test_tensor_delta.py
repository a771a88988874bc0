"""Deltas of floats are exact for all bit patterns, small for small steps, and refused for anything else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra.errors import LograError
from logra.tensor_delta import DELTA_DTYPES, TensorDelta

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@st.composite
def pairs(draw):
    """Two tensors of random bits, so NaNs, infinities, denormals and both zeros are among them."""
    dtype = draw(st.sampled_from(list(DELTA_DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    info = torch.iinfo(INTEGERS[dtype])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    bits = [torch.randint(info.min, info.max + 1, shape, generator=generator).to(INTEGERS[dtype]) for _ in range(2)]
    return [value.view(dtype) for value in bits]


@settings(max_examples=60)
@given(pairs())
def test_old_value_and_delta_give_the_new_bits(pair):
    # Catches a difference that saturates, a zigzag that loses the sign, and NaNs that arithmetic would change.
    old, new = pair
    delta = TensorDelta.between(old, new)
    received = TensorDelta.from_planes(delta.dtype, delta.planes())
    assert torch.equal(received.difference, delta.difference)
    integers = INTEGERS[old.dtype]
    assert torch.equal(received.applied(old).view(integers), new.view(integers))


@settings(max_examples=60)
@given(pairs())
def test_planes_are_the_documented_ones(pair):
    # The same from Python integers: catches planes in another order and another zigzag code.
    old, new = pair
    num_bits = 8 * old.element_size()

    def number(bits: int) -> int:
        return bits if bits >= 0 else bits ^ (2 ** (num_bits - 1) - 1)

    integers = INTEGERS[old.dtype]
    planes = TensorDelta.between(old, new).planes()
    assert planes.shape == (old.element_size(), *old.shape)
    bits = zip(old.view(integers).flatten().tolist(), new.view(integers).flatten().tolist(), strict=True)
    for (a, b), column in zip(bits, planes.reshape(old.element_size(), -1).T.tolist(), strict=True):
        step = (number(b) - number(a) + 2 ** (num_bits - 1)) % 2**num_bits - 2 ** (num_bits - 1)
        assert int.from_bytes(bytes(column), "little") == (2 * step if step >= 0 else -2 * step - 1)


def test_numbers_follow_the_order_of_floats():
    # Catches XOR in place of the order: a step across a power of two or across zero would change many bits.
    values = torch.tensor([1.0, -0.0, -1.5, 2.0])
    expected = [1, 1, -1, -1]
    neighbours = torch.tensor([1.0, 0.0, -1.5, 2.0])
    neighbours[0], neighbours[2], neighbours[3] = 1 + 2**-23, -1.5 - 2**-23, 2 - 2**-23
    assert TensorDelta.between(values, neighbours).difference.tolist() == expected


def test_what_has_no_delta_is_refused():
    one = torch.ones(3)
    for old, new in [(one, one.double()), (one, torch.ones(2)), (one.double(), one.double()), (one.int(), one.int())]:
        with pytest.raises(LograError, match="TensorDelta"):
            TensorDelta.between(old, new)
    delta = TensorDelta.between(one, one)
    for old in (torch.ones(2), one.bfloat16()):
        with pytest.raises(LograError, match="needs"):
            delta.applied(old)
    with pytest.raises(LograError, match="int16"):
        TensorDelta(torch.float32, torch.zeros(3, dtype=torch.int16))
    for planes in (torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.int8), torch.tensor(4)):
        with pytest.raises(LograError, match="planes"):
            TensorDelta.from_planes(torch.float32, planes)
