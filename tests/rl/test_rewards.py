"""Rewards: what a function may return, what is read off a completion, and which groups carry no signal."""

import asyncio
import functools
import math

import pytest
import torch

from logra.errors import DataError
from logra.rl.rewards import check_rewards, checked, completion_text, last_integer, require_finite, signal_free_rows

NAN = math.nan


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 - 9 = -4.", -4),
        ("The answer is 12", 12),
        ("7, or rather 8", 8),
        ("no number", None),
        ("", None),
        ("3.5", 5),
        ("007", 7),
        ("9-4", -4),
    ],
)
def test_the_last_integer_decides(text, expected):
    # Catches taking the first number, or losing the sign.
    assert last_integer(text) == expected


def test_completion_text_reads_both_forms():
    assert completion_text("abc") == "abc"
    assert completion_text([{"role": "assistant", "content": "abc"}, {"role": "tool", "content": None}]) == "abc"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 completions"),
        ([1.0, math.inf], "returned inf for completion 1"),
        ([-math.inf, 1.0], "returned -inf for completion 0"),
        ([NAN, 1.0], "returned nan for completion 0"),
        (["good", 1.0], "returned 'good' for completion 0"),
        (1.0, "returned float"),
        ("ab", "returned str"),
        (None, "returned NoneType"),
        ({1.0: "a", 2.0: "b"}, "returned dict"),
        ({1.0, 2.0}, "returned set"),
        ({1.0: 0, 2.0: 0}.keys(), "returned dict_keys"),
        (["1.0", 1.0], "returned '1.0' for completion 0"),
    ],
)
def test_unusable_rewards_name_the_function(values, message):
    # Catches an infinite reward that would kill the run one step later, and a string that is taken for two rewards.
    with pytest.raises(DataError, match="'my_reward'") as caught:
        check_rewards(values, name="my_reward", num_completions=2)
    assert message in str(caught.value)


def test_usable_rewards_pass():
    assert check_rewards([1, None, True], name="f", num_completions=3) == [1.0, None, 1.0]
    assert check_rewards(torch.tensor([0.5, 1.0]), name="f", num_completions=2) == [0.5, 1.0]
    assert check_rewards((x for x in (1.0, 2.0)), name="f", num_completions=2) == [1.0, 2.0]


def test_checked_keeps_functions_callable_as_before():
    def plain(completions, **_):
        return [float(len(c)) for c in completions]

    async def slow(completions, **_):
        return [2.0 for _ in completions]

    class Callable:
        async def __call__(self, completions, **_):
            return [3.0]

    assert checked(plain, "p")(completions=["ab"], answer=["x"]) == [2.0]
    assert checked(functools.partial(plain), "p")(completions=["ab"]) == [2.0]
    # Catches a wrapper that makes an async function look synchronous, so that TRL would never await it.
    assert asyncio.run(checked(slow, "s")(completions=["ab"])) == [2.0]
    assert asyncio.run(checked(Callable(), "c")(completions=["ab"])) == [3.0]
    assert checked(plain, "named").__name__ == "named"


def test_a_reward_model_must_be_finite():
    require_finite(torch.tensor([[1.0, NAN]]), ["a", "b"])
    with pytest.raises(DataError, match="'b'"):
        require_finite(torch.tensor([[1.0, math.inf]]), ["a", "b"])


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([0.35] * 8, True),  # the mean of these is not 0.35 in floating point
        ([0.1 + 0.2, 0.3], True),  # equal up to rounding
        ([0.0, 0.0], True),
        ([0.0, 1e-3], False),
        ([1.0, 1.00001], False),
        ([NAN, 0.5, 0.5], True),  # the completion that nobody scored is left out
        ([NAN, 0.5, 0.6], False),
        ([NAN, NAN], True),
        ([-0.35] * 4, True),
    ],
)
def test_signal_free_groups(group, expected):
    rewards = torch.tensor(group)[:, None]
    assert signal_free_rows(rewards, len(group)).tolist() == [expected] * len(group)


def test_groups_are_judged_one_by_one_and_in_every_column():
    rewards = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    # Catches comparing over the whole batch, or only the first column.
    assert signal_free_rows(rewards, 2).tolist() == [True, True, False, False]


def test_a_reward_function_that_raises_is_named():
    def plain(completions, **_):
        return {}["answer"]

    async def slow(completions, **_):
        return {}["answer"]

    with pytest.raises(DataError, match="reward function 'p' raised KeyError: 'answer'") as caught:
        checked(plain, "p")(completions=["ab"])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(DataError, match="reward function 's' raised KeyError: 'answer'"):
        asyncio.run(checked(slow, "s")(completions=["ab"]))
