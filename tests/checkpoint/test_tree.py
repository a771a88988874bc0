"""Nested state as JSON and tensors."""

import enum
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra.checkpoint import tree
from logra.errors import LograError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
STATE = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.sampled_from(["$tensor", "$tuple"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(STATE)
def test_every_plain_state_comes_back(state):
    # Catches tuples that become lists, integer keys that become texts, and reserved keys that are misread.
    found = tree.decode(*tree.encode(state))
    assert found == state
    assert repr(found) == repr(state)  # 1 == 1.0 == True, and (1,) == (1,) whatever its items' types


def test_tensors_and_floats_that_json_lacks():
    state = {0: {"exp_avg": torch.tensor([1.5]), "step": 3}, "limits": (math.inf, -math.inf, math.nan)}
    text, tensors = tree.encode(state)
    assert "Infinity" not in text and "NaN" not in text
    found = tree.decode(text, tensors)
    assert torch.equal(found[0]["exp_avg"], state[0]["exp_avg"])
    assert found["limits"][:2] == (math.inf, -math.inf) and math.isnan(found["limits"][2])


@pytest.mark.parametrize(
    "value", [object(), np.float64(1.0), enum.IntEnum("Kind", "A").A, {"a": [print]}, {1, 2}, b"bytes"]
)
def test_objects_are_refused(value):
    with pytest.raises(LograError, match="a checkpoint holds tensors"):
        tree.encode({"x": value})


@pytest.mark.parametrize("text", ['{"$tensor": "gone"}', "{", '{"$dict": [1]}', '{"$float": "x"}', "[" * 100_000])
def test_damaged_text_is_refused(text):
    with pytest.raises(LograError, match="cannot be read"):
        tree.decode(text, {})
