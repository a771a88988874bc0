"""Learning curves on two harder tasks: products of one digit, and sums of two digits from a warm start.

A cell is one whole run of one method with one seed, as in `logra bench learning`. The second task starts from a model that
has seen a few right answers (`lab.warm_start`), the same one for all methods of a seed.
"""

from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, require_known
from logra.bench.lab import training
from logra.bench.learning import ARMS

TWO_DIGITS = {"min_digits": 2, "max_digits": 2}
TASKS = {"products": "products of one digit", "two_digits": "sums and differences of two digits, from a warm start"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Tasks."""
    arms: tuple[str, ...] = ("logra", "adamw", "lora", "galore")
    """Methods, by their names in `logra bench learning`; galore and apollo need their packages (`make baselines`)."""

    def __post_init__(self) -> None:
        require_known("tasks", self.tasks, TASKS)
        require_known("arms", self.arms, ARMS)


def cells(options: Options) -> list[Cell]:
    """Every method on one task with one seed before the next."""
    return [
        {"task": task, "arm": arm, "seed": seed}
        for seed in options.seeds
        for task in options.tasks
        for arm in options.arms
    ]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Make the warm start where the task needs one, train, and keep the results and the curves."""
    flags, seed = [*ARMS[cell["arm"]][1], *task_flags(cell["task"])], cell["seed"]
    if cell["task"] != "two_digits":
        return training.run(flags, seed=seed)
    from logra.bench.lab.warm_start import warm_start

    return training.run(flags, seed=seed, model=warm_start("chain_sum", TWO_DIGITS, seed=seed))


def task_flags(task: str) -> list[str]:
    """The flags of `logra train` that choose a task of `TASKS`; the default model, or the warm start, is chosen apart."""
    if task == "two_digits":
        return [word for name, value in TWO_DIGITS.items() for word in (f"--task-options.{name}", str(value))]
    return ["--task", task]


def table(results: Results) -> str:
    """Results over seeds and learning curves, by task."""
    parts = []
    for task in (task for task in TASKS if task in results.values("task")):
        runs = {title: results.select(task=task, arm=arm) for arm, (title, _) in ARMS.items()}
        runs = {title: cells for title, cells in runs.items() if cells}
        if runs:
            parts += [f"**{TASKS[task]}**", training.summary(runs), training.curves(runs)]
    if not parts:
        raise training.nothing_to_show(results)
    return "\n\n".join(parts)
