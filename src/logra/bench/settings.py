"""Settings of logra compared at equal KL per step on a small policy: direction, momentum, rank, projections and more.

A cell trains one policy, pretrained from scratch, with one setting: from the same weights, on the same prompts and with
the same noise as every other cell of its seed, so that settings are compared seed by seed.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, require_known, require_positive, spread
from logra.bench.lab.report import mean_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the policies, prompts and samples."""
    arms: tuple[str, ...] = ()
    """Names of `logra.bench.lab.axes`; none: all."""
    num_steps: int = 60
    """Updates of each setting."""
    num_prompts: int = 32
    """Of a step, with 8 samples each."""
    kl_budget: float = 0.005
    """KL that every step realises, nats per generated token."""

    def __post_init__(self) -> None:
        from logra.bench.lab.axes import ARMS

        require_known("arms", self.arms, ARMS)
        require_positive(self, "num_steps", "num_prompts", "kl_budget")


def cells(options: Options) -> list[Cell]:
    """Every setting with one seed before the next seed."""
    from logra.bench.lab.axes import AXES

    arms = options.arms or dict.fromkeys(name for axis in AXES.values() for name in axis.values())
    return [{"arm": arm, "seed": seed} for seed in options.seeds for arm in arms]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """The curves of one setting, and the expected accuracy of the policy before and after."""
    from logra.bench.lab import small_policy
    from logra.bench.lab.axes import ARMS
    from logra.bench.lab.equal_kl import equal_kl

    sums = small_policy.TWENTY
    model = small_policy.build_policy(cell["seed"], sums).eval()

    def accuracies() -> dict[str, float]:
        return {
            "trained": small_policy.expected_accuracy(model, sums, heldout=False),
            "heldout": small_policy.expected_accuracy(model, sums, heldout=True),
        }

    before = accuracies()
    curves = small_policy.train_policy(
        model, ARMS[cell["arm"]], sums, seed=cell["seed"], num_steps=options.num_steps,
        num_prompts=options.num_prompts, trust=equal_kl(options.kl_budget), measure_every=10,
    )  # fmt: skip
    return {**curves, "before": before, "after": accuracies()}


def table(results: Results) -> str:
    """A table for every axis along which something was compared; differences are taken within a seed."""
    from logra.bench.lab.axes import AXES, DEFAULT

    by_cell = {(record.cell["arm"], record.cell["seed"]): record.result for record in results.records}
    texts = []
    for axis, values in AXES.items():
        rows = []
        for label, arm in values.items():
            seeds = sorted(seed for name, seed in by_cell if name == arm)
            if seeds:
                runs = [by_cell[arm, seed] for seed in seeds]
                pairs = [(by_cell[arm, seed], by_cell[DEFAULT, seed]) for seed in seeds if (DEFAULT, seed) in by_cell]
                rows.append([label, str(len(seeds)), *_columns(runs), *_differences(pairs)])
        if len(rows) > 1:
            texts.append(markdown_table([axis, *HEADER], rows))
    return "\n\n".join(texts)


SUMS = {"trained": "trained sums", "heldout": "held-out sums"}
HEADER = ("seeds", *(f"accuracy, {kind}" for kind in SUMS.values()), "reward, all rollouts",
          "collateral / on-task KL, x 1000", *(f"less the default's x 100, {kind}" for kind in SUMS.values()))  # fmt: skip


def _columns(runs: list[dict[str, Any]]) -> list[str]:
    collateral = [1000 * mean_of(run["collateral_kl"]) / mean_of(run["realised_kl"]) for run in runs]
    return [
        *(spread([run["after"][kind] for run in runs]) for kind in SUMS),
        spread([mean_of(run["reward"]) for run in runs]),
        spread(collateral, 0),
    ]


def _differences(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Mean difference in accuracy over seeds, and its standard error; 0 of the default itself, - where it has not run."""
    if not pairs:
        return ["-"] * len(SUMS)
    texts = []
    for kind in SUMS:
        found = [100 * (run["after"][kind] - other["after"][kind]) for run, other in pairs]
        error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.1f}" if any(found) and len(found) > 1 else ""
        texts.append(f"{statistics.fmean(found):+.1f}{error}" if any(found) else "0")
    return texts
