"""Sentinels: pure functions of the metrics history that say when a run leaves the road.

A history is a sequence of metrics of one step each (`{name: number}`), the step in question last. A measure returns the
number to compare with its threshold, or None where the metrics or the history do not tell yet.

    entropy_floor      policy/entropy                                       below
    reference_kl       kl                                                   above
    realised_kl        trust/realised_kl / trust/budget                     above
    length_jump        max(x, 1/x), x = length / median of the window       above
    truncation         completions/clipped_ratio                            at least
    repetition         guards/repetition                                    above
    effective_samples  guards/effective_samples                             below
    reward_drop        (mean of the window - mean of the last 5) / spread   above
    prediction_error   max(x, 1/x), x = realised / predicted KL             above
    filtered           smallest guards/filtered of the last 5 steps         at least
    update_norm        optim/update_ratio / median of the window            above
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from logra.rl.guards.config import Sentinels
from logra.rl.guards.events import Event

Metrics = Mapping[str, float]
History = Sequence[Metrics]

RECENT = 5
"""Steps that a drop of the reward, and filtering, must last."""
KL_NOISE = 1e-7
"""KLs below this, nats per token, are rounding of the log-probabilities: their ratio means nothing."""
SPREAD_FLOOR = 0.05
"""The spread of the rewards counts as at least this share of their mean: a solved task has next to none."""


def entropy_floor(history: History, min_history: int) -> float | None:
    """Entropy of the policy, nats per generated token."""
    return _last(history, "policy/entropy")


def reference_kl(history: History, min_history: int) -> float | None:
    """KL to the reference policy, nats per generated token."""
    return _last(history, "kl")


def realised_kl(history: History, min_history: int) -> float | None:
    """Realised KL over the budget, of a step that was taken."""
    realised, budget = _last(history, "trust/realised_kl"), _last(history, "trust/budget")
    if realised is None or not budget or not _was_taken(history):
        return None
    return realised / budget


def length_jump(history: History, min_history: int) -> float | None:
    """Factor between the mean completion length and its median in the window."""
    return _factor(_over_median(history, "completions/mean_length", min_history))


def truncation(history: History, min_history: int) -> float | None:
    """Share of completions that ended at the longest length allowed."""
    return _last(history, "completions/clipped_ratio")


def repetition(history: History, min_history: int) -> float | None:
    """Mean share of repeated 4-token sequences."""
    return _last(history, "guards/repetition")


def effective_samples(history: History, min_history: int) -> float | None:
    """Effective sample size over the number of tokens."""
    return _last(history, "guards/effective_samples")


def reward_drop(history: History, min_history: int) -> float | None:
    """How far the last steps lie below the window before them, in standard deviations."""
    values = _series(history, "reward/mean")
    before, recent = values[:-RECENT], values[-RECENT:]
    if len(values) < min_history or len(before) < 2:
        return None
    mean = statistics.fmean(before)
    spread = max(statistics.pstdev(before), SPREAD_FLOOR * abs(mean))
    return (mean - statistics.fmean(recent)) / spread if spread > 0 else 0.0


def prediction_error(history: History, min_history: int) -> float | None:
    """Factor between the KL that was predicted for the step as taken and the one that it realised."""
    predicted, realised = _last(history, "trust/planned_kl"), _last(history, "trust/realised_kl")
    if predicted is None or realised is None or min(predicted, realised) < KL_NOISE or not _was_taken(history):
        return None
    return _factor(realised / predicted)


def filtered(history: History, min_history: int) -> float | None:
    """Smallest share of filtered completions in the last steps."""
    values = _series(history[-RECENT:], "guards/filtered")
    return min(values) if len(values) == RECENT else None


def update_norm(history: History, min_history: int) -> float | None:
    """Relative length of the step over its median in the window."""
    return _over_median(history, "optim/update_ratio", min_history)


Measure = Callable[[History, int], float | None]

BEFORE_THE_MERGE: dict[str, Measure] = {
    "entropy_floor": entropy_floor,
    "reference_kl": reference_kl,
    "length_jump": length_jump,
    "truncation": truncation,
    "repetition": repetition,
    "effective_samples": effective_samples,
    "reward_drop": reward_drop,
    "filtered": filtered,
}
"""What the rollout and the loss tell: the step can still be skipped."""
AFTER_THE_MERGE: dict[str, Measure] = {
    "realised_kl": realised_kl,
    "prediction_error": prediction_error,
    "update_norm": update_norm,
}
FLOORS = ("entropy_floor", "effective_samples")
INCLUSIVE = ("truncation", "filtered")
"""Shares, which reach their threshold but cannot pass it where it is 1."""


def breached(name: str, value: float, threshold: float) -> bool:
    """Whether a value is on the wrong side of its threshold; a value that is not a number always is."""
    if math.isnan(value):
        return True
    if name in FLOORS:
        return value < threshold
    return value >= threshold if name in INCLUSIVE else value > threshold


def check(measures: Mapping[str, Measure], history: History, config: Sentinels, step: int) -> list[Event]:
    """The events of one step, of all sentinels in `measures` that are not off.

    Args:
        measures: BEFORE_THE_MERGE or AFTER_THE_MERGE.
        history: metrics of the last steps, this one last.
        config: thresholds and actions.
        step: number of the step.
    """
    rules = config.rules()
    events = []
    for name, measure in measures.items():
        rule = rules[name]
        if rule.action == "off" or (value := measure(history, config.min_history)) is None:
            continue
        if breached(name, value, rule.threshold):
            detail = (measure.__doc__ or "").rstrip(".")
            events.append(
                Event(step=step, kind=name, value=value, threshold=rule.threshold, action=rule.action, detail=detail)
            )
    return events


def _last(history: History, name: str) -> float | None:
    return history[-1].get(name) if history else None


def _series(history: History, name: str) -> list[float]:
    """The finite values of a metric, oldest first."""
    return [value for metrics in history if (value := metrics.get(name)) is not None and math.isfinite(value)]


def _over_median(history: History, name: str, min_history: int) -> float | None:
    """The last value over the median of those before it."""
    value, before = _last(history, name), _series(history[:-1], name)
    if value is None or len(before) < min_history:
        return None
    median = statistics.median(before)
    return value / median if median > 0 else None


def _factor(ratio: float | None) -> float | None:
    """The ratio or its inverse, whichever is larger."""
    if ratio is None or not ratio > 0:
        return ratio
    return max(ratio, 1 / ratio)


def _was_taken(history: History) -> bool:
    return history[-1].get("sync/bytes", 1.0) > 0
