"""Rewards on their way into training: extraction, checks, and the groups that carry no signal.

Contract: a reward function takes TRL's keyword arguments (prompts, completions, dataset columns) and returns one
value per completion. A value is a finite number, or None for a completion that cannot be scored (it is dropped).
Everything else is a DataError that names the function; with `keep_bad`, a number that is not finite becomes infinity, which
stands for "bad" until the trainer drops the completion's group.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from logra.errors import DataError, LograError

RewardFunction = Callable[..., Any]

_NUMBER = re.compile(r"-?\d+")


def completion_text(completion: Any) -> str:
    """The text of a completion: a string, or the assistant messages of a conversation, joined."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def last_integer(text: str) -> int | None:
    """The last integer in `text`, with its sign; None if there is none. "5 - 9 = -4." gives -4."""
    found = _NUMBER.findall(text)
    return int(found[-1]) if found else None


def check_rewards(values: Any, *, name: str, num_completions: int, keep_bad: bool = False) -> list[float | None]:
    """The values a reward function returned, as floats or None.

    Args:
        values: what the function returned.
        name: of the function, for the message.
        num_completions: how many values there must be.
        keep_bad: return infinity for NaN and infinities.

    Raises:
        DataError: not a sequence of the right length, or a value that is neither None nor a finite number.
    """
    if isinstance(values, Tensor):
        values = values.tolist()
    # A mapping would yield its keys, and a set its members in an order of its own.
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise DataError(
            f"reward function {name!r} returned {type(values).__name__}: it must return a list with one number "
            f"(or None) per completion"
        )
    values = list(values)
    if len(values) != num_completions:
        raise DataError(
            f"reward function {name!r} returned {len(values)} rewards for {num_completions} completions: "
            f"it must return exactly one per completion"
        )
    return [_check_value(value, name, index, keep_bad) for index, value in enumerate(values)]


def _check_value(value: Any, name: str, index: int, keep_bad: bool) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise DataError(
            f"reward function {name!r} returned {value!r} for completion {index}: a reward is a number or None"
        ) from None
    if not math.isfinite(number):
        if keep_bad:
            return math.inf
        raise DataError(
            f"reward function {name!r} returned {number} for completion {index}: a reward must be finite. "
            f"Return None to leave a completion out, or let guards.on_bad_reward=drop leave its group out."
        )
    return number


def checked(function: RewardFunction, name: str, *, keep_bad: bool = False) -> RewardFunction:
    """`function` with its return value checked (see `check_rewards`); an async function stays async.

    What it raises becomes a DataError that names it.
    """
    check = functools.partial(check_rewards, name=name, keep_bad=keep_bad)
    call = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)):  # noqa: B004

        async def checked_async(**kwargs: Any) -> list[float | None]:
            with _named(name):
                return check(await function(**kwargs), num_completions=len(kwargs["completions"]))

        wrapper: RewardFunction = checked_async
    else:

        def checked_sync(**kwargs: Any) -> list[float | None]:
            with _named(name):
                return check(function(**kwargs), num_completions=len(kwargs["completions"]))

        wrapper = checked_sync
    wrapper.__name__ = name
    return wrapper


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside, every error but `logra`'s own says which reward function raised it."""
    try:
        yield
    except LograError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"reward function {name!r} raised {type(error).__name__}: {error}") from error


def require_finite(rewards: Tensor, names: Sequence[str]) -> None:
    """Refuse an infinite reward of a reward *model* (functions are checked one value at a time).

    Args:
        rewards: fp32 [completions, functions]; NaN stands for "not scored".
        names: of the functions, one per column.

    Raises:
        DataError: an infinite entry.
    """
    infinite = torch.isinf(rewards).any(dim=0)
    for column in infinite.nonzero().flatten().tolist():
        raise DataError(f"reward function {names[column]!r} returned an infinite reward: a reward must be finite")


def take_out_bad(rewards: Tensor, is_model: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Rewards with "not scored" in place of the bad ones, and which completions had one.

    Args:
        rewards: fp32 [completions, functions]; NaN is "not scored", infinity is bad. A reward model scores everything: its
            NaN is bad too.
        is_model: for every column, whether a reward model made it.

    Returns:
        The rewards, and bool [completions].
    """
    models = torch.tensor(list(is_model), device=rewards.device)
    bad = rewards.isinf() | (rewards.isnan() & models)
    return rewards.masked_fill(bad, math.nan), bad.any(dim=1)


def signal_free_rows(rewards: Tensor, num_generations: int) -> Tensor:
    """Which completions belong to a group whose rewards are all equal, so that their advantage must be exactly 0.

    In floating point the mean of eight times 0.35 is not 0.35: subtracting it and dividing by a standard deviation of
    nearly 0 leaves advantages of pure rounding noise. Equality is therefore decided on the rewards themselves, up to
    the rounding of a weighted sum (8 units in the last place of fp32).

    Args:
        rewards: fp32 [groups * num_generations, columns], groups contiguous; NaN stands for "not scored" and is
            left out of the comparison. A group is equal when it is equal in every column.
        num_generations: completions per group.

    Returns:
        bool [groups * num_generations].
    """
    grouped = rewards.view(-1, num_generations, rewards.shape[-1])
    highest = grouped.nan_to_num(nan=-math.inf).amax(dim=1)
    lowest = grouped.nan_to_num(nan=math.inf).amin(dim=1)
    tolerance = 8 * torch.finfo(rewards.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
    equal = (highest - lowest <= tolerance).all(dim=1)
    return equal.repeat_interleave(num_generations)
