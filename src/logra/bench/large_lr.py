"""A relative step ten times too long, with and without a trust region, on a small policy.

A cell pretrains one policy and trains it four times from the same weights, on the same prompts.
"""

from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, require_positive, spread
from logra.bench.harness.figures import plot_runs, svg
from logra.bench.lab.report import mean_of

LR = 1e-3
"""The relative step at which this policy learns without a trust region."""
CASES: dict[str, tuple[str, float, bool]] = {
    "lr": ("lr, no trust region", 1.0, False),
    "lr-trust": ("lr, trust region", 1.0, True),
    "10lr": ("10 lr, no trust region", 10.0, False),
    "10lr-trust": ("10 lr, trust region", 10.0, True),
}
"""Title, multiple of `LR`, and whether a trust region scales the steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the policies, prompts and samples."""
    num_steps: int = 75
    """Updates of each case."""
    kl_budget: float = 1e-3
    """Budget of the trust region, nats per generated token."""

    def __post_init__(self) -> None:
        require_positive(self, "num_steps", "kl_budget")


def cells(options: Options) -> list[Cell]:
    """One a seed."""
    return [{"seed": seed} for seed in options.seeds]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """The four cases from one pretrained policy: rewards of every step, and held-out accuracy at the end."""
    from logra.bench.lab import small_policy
    from logra.bench.lab.arms import Arm
    from logra.trust import TrustRegion

    found: dict[str, Any] = {}
    for name, (_, multiple, is_trusted) in CASES.items():
        arm = Arm({"lr": multiple * LR, "rank": 16, "direction": "spectral", "momentum": 0.9})
        trust = TrustRegion(kl_budget=options.kl_budget) if is_trusted else None
        trained = small_policy.train(arm, seed=cell["seed"], num_steps=options.num_steps, trust=trust)
        found[name] = {key: trained[key] for key in ("reward", "realised_kl", "heldout")}
    return found


def table(results: Results) -> str:
    """One row a case."""
    records = results.select()
    rows = []
    for name, (title, _, _) in CASES.items():
        runs = [record[name] for record in records]
        rows.append(
            [
                title,
                str(len(runs)),
                spread([mean_of(run["reward"][:3]) for run in runs]),
                spread([mean_of(run["reward"][-5:]) for run in runs]),
                spread([run["heldout"] for run in runs]),
            ]
        )
    header = ["steps of", "seeds", "reward, first 3 rollouts", "last 5 rollouts", "held-out accuracy, sampled"]
    return markdown_table(header, rows)


def figure(results: Results) -> str:
    """Mean reward of each step with the range over seeds, as SVG."""
    from matplotlib.figure import Figure

    records = results.select()
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, (title, _, _)), colour in zip(CASES.items(), ("#0072B2", "#009E73", "#D55E00", "#CC79A7"), strict=True):
        runs = [record[name]["reward"] for record in records]
        plot_runs(axes, range(len(runs[0])), runs, label=title, colour=colour)
    axes.set_xlabel("update")
    axes.set_ylabel("reward (share of right sums)")
    axes.set_ylim(0, 1)
    axes.legend(loc="upper left", fontsize="small")
    return svg(figure)
