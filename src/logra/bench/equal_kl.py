"""Directions compared at equal KL per step on a small policy: gain on unseen samples, collateral, reward.

A cell pretrains one policy and trains it with every direction, from the same weights, on the same prompts.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, spread
from logra.bench.lab.report import HEADER, arm_columns


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of the policies, prompts and samples."""
    num_steps: int = 24
    """Updates of each direction."""
    kl_budget: float = 0.01
    """KL that every step realises, nats per generated token."""


def cells(options: Options) -> list[Cell]:
    """One a seed."""
    return [{"seed": seed} for seed in options.seeds]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """All directions from one pretrained policy."""
    from logra.bench.lab import small_policy
    from logra.bench.lab.arms import ARMS
    from logra.bench.lab.equal_kl import equal_kl

    trust = equal_kl(options.kl_budget)
    return {
        name: small_policy.train(arm, seed=cell["seed"], num_steps=options.num_steps, trust=trust)
        for name, arm in ARMS.items()
    }


def table(results: Results) -> str:
    """One row a direction, in the order of held-out accuracy."""
    from logra.bench.lab.arms import ARMS

    records = results.select()
    rows = []
    for name in (name for name in ARMS if all(name in record for record in records)):
        runs = [record[name] for record in records]
        heldout = [run["heldout"] for run in runs]
        rows.append((statistics.fmean(heldout), [ARMS[name].title, *arm_columns(runs), spread(heldout)]))
    rows.sort(key=lambda row: -row[0])
    return markdown_table(["direction", *HEADER, "held-out accuracy, sampled"], [row for _, row in rows])
