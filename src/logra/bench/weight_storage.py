"""Learning curves of the weight storages on a small policy: fp32, bf16 with 16 more bits, bf16 with 8.

A cell pretrains one policy and trains it in every storage, from the same weights rounded to bf16, on the same prompts. Split
weights compute in bf16 and fp32 weights in fp32: split32, exactly fp32 in what it stores, tells the two effects apart.
"""

from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, require_positive, spread
from logra.bench.lab.report import mean_of

STORAGES = ("fp32", "split32", "split24")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of the policies, prompts and samples."""
    num_steps: int = 75
    """Updates in each storage."""
    lr: float = 1e-3
    """Relative step; no trust region."""

    def __post_init__(self) -> None:
        require_positive(self, "num_steps", "lr")


def cells(options: Options) -> list[Cell]:
    """One a seed."""
    return [{"seed": seed} for seed in options.seeds]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """All storages from one pretrained policy: rewards of every step, and held-out accuracy at the end."""
    from logra.bench.lab import small_policy
    from logra.bench.lab.arms import Arm

    found: dict[str, Any] = {}
    for storage in STORAGES:
        arm = Arm({"lr": options.lr, "rank": 16, "weight_storage": storage})
        trained = small_policy.train(arm, seed=cell["seed"], num_steps=options.num_steps, trust=None, from_bf16=True)
        found[storage] = {key: trained[key] for key in ("reward", "heldout")}
    return found


def table(results: Results) -> str:
    """One row a storage."""
    records = results.select()
    rows = []
    for storage in STORAGES:
        runs = [record[storage] for record in records]
        rows.append(
            [
                f"`{storage}`",
                str(len(runs)),
                spread([mean_of(run["reward"][:3]) for run in runs]),
                spread([mean_of(run["reward"][-5:]) for run in runs]),
                spread(
                    [
                        1000 * (mean_of(record[storage]["reward"]) - mean_of(record["fp32"]["reward"]))
                        for record in records
                    ]
                ),
                spread([run["heldout"] for run in runs]),
            ]
        )
    header = ["storage", "seeds", "reward, first 3 rollouts", "last 5 rollouts", "all rollouts, less that of `fp32`, x 1000",
              "held-out accuracy, sampled"]  # fmt: skip
    return markdown_table(header, rows)
