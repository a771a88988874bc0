"""Directions compared at equal KL per step on the default model and task: gain, collateral, reward.

A cell is one direction with one seed, a few minutes on one core.
"""

from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, require_known, require_positive
from logra.bench.lab.report import HEADER, arm_columns

ARMS = {
    "spectral-32-m": "two-sided spectral, r = 32, momentum 0.9",
    "dense-adamw": "dense AdamW",
    "row-adam-64": "one-sided row_adam, r = 64",
    "row-adam-scaled-64": "one-sided row_adam, r = 64, input scaling",
    "spectral-32": "two-sided spectral, r = 32",
}
"""Name in `logra.bench.lab.axes` -> title."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the problems and samples."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Directions."""
    num_steps: int = 8
    """Updates of each direction."""
    kl_budget: float = 0.02
    """KL that every step realises, nats per generated token."""

    def __post_init__(self) -> None:
        require_known("arms", self.arms, ARMS)
        require_positive(self, "num_steps", "kl_budget")


def cells(options: Options) -> list[Cell]:
    """Every direction with one seed before the next seed."""
    return [{"arm": arm, "seed": seed} for seed in options.seeds for arm in options.arms]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """One direction from the released weights."""
    from logra.bench.lab import axes
    from logra.bench.lab.equal_kl import equal_kl
    from logra.bench.lab.loop import Setting, run_arm
    from logra.bench.lab.smollm2 import DefaultTask

    default = DefaultTask(cell["seed"], options.num_steps)
    setting = Setting(
        num_steps=options.num_steps,
        temperature=1.0,
        micro_batch=16,
        roll_out=default.roll_out,
        unrelated=default.unrelated_text(),
    )
    arm = axes.ARMS[cell["arm"]]
    return run_arm(default.model, arm, setting, trust=equal_kl(options.kl_budget), seed=cell["seed"])


def table(results: Results) -> str:
    """One row a direction."""
    rows = []
    for name, title in ARMS.items():
        runs = results.select(arm=name)
        if runs:
            rows.append([title, str(len(runs)), *arm_columns(runs)])
    return markdown_table(["direction", "seeds", *HEADER], rows)
