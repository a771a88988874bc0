"""Curves of a group: mean over its runs, and the range they span."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from logra.report.groups import Group
from logra.report.run import Run

Reading = Callable[[dict[str, Any]], float | None]
"""Takes a number out of the metrics of a step; None where there is none."""


@dataclass(frozen=True)
class Band:
    """Values of a group at each step that any of its runs has one for."""

    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)


LARGEST = 1e100
"""Numbers beyond it are left out as infinite ones are: they can be neither averaged nor drawn."""


def metric(name: str, scale: float = 1.0) -> Reading:
    """Reads a metric by its name; `scale` changes its unit."""

    def read(step: dict[str, Any]) -> float | None:
        value = step.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < LARGEST:
            return None
        return value * scale

    return read


def band(points: Iterable[tuple[float, float]]) -> Band:
    """Mean and range of the values that share a step.

    Args:
        points: (step, value) of all runs together.
    """
    at: dict[float, list[float]] = {}
    for step, value in points:
        at.setdefault(step, []).append(value)
    steps = sorted(at)
    return Band(
        steps,
        [statistics.fmean(at[step]) for step in steps],
        [min(at[step]) for step in steps],
        [max(at[step]) for step in steps],
    )


def curve(group: Group, read: Reading) -> Band:
    """A metric of a group over its steps."""
    return band((step["step"], value) for run in group.runs for step in run.steps if (value := read(step)) is not None)


def heldout(group: Group) -> Band:
    """Held-out score before the first step and after the last."""
    points: list[tuple[float, float]] = []
    for run in group.runs:
        scores = run.results.get("heldout") or {}
        for step, key in ((0, "before"), (last_step(run), "after")):
            if (score := metric(key)(scores)) is not None:
                points.append((step, score))
    return band(points)


def last_step(run: Run) -> int:
    """Number of the last step that ended."""
    return int(run.steps[-1]["step"])


def mean_of(run: Run, read: Reading, *, first: int | None = None, last: int | None = None) -> float | None:
    """Mean of a metric over the first or the last steps of a run, or all; None where it has none."""
    steps = run.steps[:first] if first else run.steps[-last:] if last else run.steps
    values = [value for step in steps if (value := read(step)) is not None]
    return statistics.fmean(values) if values else None
