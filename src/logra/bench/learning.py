"""Learning curves of every method on the default run of `logra train`: same problems, order, sampling seeds and loss.

A cell is one whole run of one method with one seed.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, require_known
from logra.bench.harness.figures import plot_runs, svg
from logra.bench.lab import training

BUDGET = ("--trust.kl-budget", "0.03", "--trust.kl-budget-final", "0.01", "--trust.schedule-steps", "15")
SCHEDULE = ("--logra.coherence-scaling", "false", *BUDGET)
"""A KL per step that does not ask how far gradients agree."""
UNSCALED = ("--logra.input-scaling", "false")
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logra": ("`logra` (two-sided, spectral, momentum 0.9, input scaling, rank 16)", ("--method", "logra")),
    "logra-2e-4": ("`logra`, lr 2e-4", ("--method", "logra", "--logra.lr", "2e-4")),
    "logra-unscaled": ("`logra`, inputs not scaled", ("--method", "logra", *UNSCALED)),
    "logra-schedule": (
        "`logra`, inputs not scaled, KL 0.03 to 0.01 for every step",
        ("--method", "logra", *UNSCALED, *SCHEDULE),
    ),
    "logra-r32": (
        "the same, rank 32",
        ("--method", "logra", "--logra.rank", "32", *UNSCALED, *SCHEDULE),
    ),
    "adamw": ("dense AdamW, lr 3e-5", ("--method", "adamw")),
    "lora": ("LoRA, all linear, rank 16, lr 3e-4", ("--method", "lora")),
    "galore": ("GaLore, rank 64, lr 3e-4", ("--method", "galore")),
    "apollo": ("APOLLO, rank 64, lr 1e-4", ("--method", "apollo")),
    "paper": ("`paper` (one-sided row_adam, rank 256, budget 2e-4)", ("--method", "paper")),
}
"""Name of an arm: its title in tables, and its flags."""
_COLOURS = {"logra": "#0072B2", "adamw": "#D55E00", "lora": "#009E73", "galore": "#CC79A7", "apollo": "#E69F00",
            "paper": "#56B4E9"}  # fmt: skip
"""Arms of the figure."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs."""
    arms: tuple[str, ...] = ("logra", "adamw", "lora", "paper")
    """Methods; galore and apollo need their packages (`make baselines`)."""

    def __post_init__(self) -> None:
        require_known("arms", self.arms, ARMS)


def cells(options: Options) -> list[Cell]:
    """Every method with one seed before the next seed."""
    return [{"arm": arm, "seed": seed} for seed in options.seeds for arm in options.arms]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Train, and keep the results and the curves."""
    return training.run(ARMS[cell["arm"]][1], seed=cell["seed"])


def table(results: Results) -> str:
    """Results over seeds, and the learning curves."""
    return training.table(results, ARMS)


def figure(results: Results) -> str:
    """Mean reward of every three steps with the range over seeds, beside the mean peak memory of the processes, as SVG."""
    from matplotlib.figure import Figure

    present = results.values("arm")
    drawn = {arm: _COLOURS[arm] for arm in ARMS if arm in present and arm in _COLOURS}
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for arm, colour in drawn.items():
        title = ARMS[arm][0].partition(",")[0].partition(" (")[0].replace("`", "")
        runs = results.select(arm=arm)
        rewards = [training.by_three_steps(result) for result in runs]
        steps = [3 * index + 2 for index in range(len(rewards[0]))]
        plot_runs(curves, steps, rewards, label=title, colour=colour, marker="o")
        if peaks := training.peaks_gib(runs):
            peak = statistics.fmean(peaks)
            bars.barh(title, peak, color=colour)
            bars.annotate(f"{peak:.2f}", (peak, title), xytext=(3, 0), textcoords="offset points", va="center")
    curves.set(xlabel="step", ylabel="reward (share of right sums)", ylim=(0, 1))
    curves.legend(loc="upper left", fontsize="small", frameon=False)
    bars.set(xlabel="peak memory of the process, GiB")
    bars.margins(x=0.15)
    bars.invert_yaxis()
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return svg(figure)
