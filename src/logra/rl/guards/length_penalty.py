"""A cosine penalty on long completions that is switched on for a part of every cycle of steps.

    penalty(L) = weight · (1 - cos(π min(L, M) / M)) / 2          L tokens of M allowed ones

Zero for an empty completion, `weight` for one of the longest allowed length, flat at both ends. The policy may grow its
answers while the penalty is off and has to keep what it gained in shorter ones while it is on.

Source: cosine length reward: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373); on a schedule:
ProRL (arXiv 2505.24864).
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from logra.rl.guards.config import LengthPenalty


def penalty(length: int, *, weight: float, max_length: int) -> float:
    """What a completion of `length` tokens loses."""
    return 0.5 * weight * (1.0 - math.cos(math.pi * min(length, max_length) / max_length))


def is_on(step: int, config: LengthPenalty) -> bool:
    """Whether the penalty holds in step `step` (from 0): in the last `on_steps` of every cycle."""
    return step % config.cycle_steps >= config.cycle_steps - config.on_steps


def with_length_penalty(reward: Callable[..., Any], config: LengthPenalty, max_length: int) -> Callable[..., Any]:
    """`reward` less the penalty of each completion; itself where the weight is 0.

    Args:
        reward: a TRL reward function, plain or async. A reward that is no number stays as it is.
        config: weight and cycle.
        max_length: longest allowed completion, tokens.

    Returns:
        A reward function of the same name. It logs the mean penalty as `guards/length_penalty`.
    """
    if config.weight == 0:
        return reward

    def subtract(values: Any, completion_ids: Sequence[Sequence[int]], step: int, log_metric: Any) -> Any:
        on = is_on(step, config)
        losses = [
            penalty(len(ids), weight=config.weight, max_length=max_length) if on else 0.0 for ids in completion_ids
        ]
        log_metric("guards/length_penalty", sum(losses) / len(losses))
        try:
            values = list(values)
        except TypeError:
            return values  # not a list of rewards: the check of the trainer says so
        if len(values) != len(losses):
            return values
        return [
            value - loss if isinstance(value, (int, float)) else value
            for value, loss in zip(values, losses, strict=True)
        ]

    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def penalised_async(**kwargs: Any) -> Any:
            values = await reward(**kwargs)
            return subtract(values, kwargs["completion_ids"], kwargs["trainer_state"].global_step, kwargs["log_metric"])

        return penalised_async

    @functools.wraps(reward)
    def penalised(**kwargs: Any) -> Any:
        values = reward(**kwargs)
        if inspect.isawaitable(values):
            values = asyncio.run(_wait_for(values))
        return subtract(values, kwargs["completion_ids"], kwargs["trainer_state"].global_step, kwargs["log_metric"])

    return penalised


async def _wait_for(values: Any) -> Any:
    return await values
