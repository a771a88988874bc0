"""What the tables of the lab say of an arm's curves."""

import statistics
from typing import Any

from logra.bench.harness import spread


def mean_of(values: list[float | None]) -> float:
    """Mean of the values that are there; NaN of none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else float("nan")


def arm_columns(runs: list[dict[str, Any]]) -> list[str]:
    """Gain per step, collateral and reward of one arm over seeds, as mean and range.

    Args:
        runs: curves of `run_arm`, one per seed.
    """
    gains = [100 * mean_of(run["gain"]) for run in runs]
    collateral = [1000 * mean_of(run["collateral_kl"]) / mean_of(run["realised_kl"]) for run in runs]
    last = [mean_of(run["reward"][-5:]) for run in runs]
    return [spread(gains), spread(collateral), spread(last)]


HEADER = ("gain per step, reward x 100", "collateral / on-task KL, x 1000", "reward, last 5 rollouts")
