"""`Task`: what a run trains on, whatever it was made of, and `load_task`, which makes it from the configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from logra.errors import DataError
from logra.rl.tasks import file as file_task
from logra.rl.tasks import gym as gym_task
from logra.rl.tasks.problems import Row, require_enough


@dataclass(frozen=True)
class Task:
    """Problems and their reward.

    Attributes:
        name: as the user gave it.
        train: rows to train on, distinct by prompt.
        heldout: rows that are never trained on.
        reward: TRL reward function.
        score_name: what the mean reward of the held-out rows is called: "accuracy" where a reward is 0 or 1.
    """

    name: str
    train: list[Row]
    heldout: list[Row]
    reward: Callable[..., Any]
    score_name: Literal["accuracy", "mean reward"]


def load_task(
    name: str,
    *,
    options: dict[str, Any] | None = None,
    dataset: str | None = None,
    num_heldout: int = 128,
    num_prompts: int = 8,
    num_steps: int = 15,
    seed: int = 0,
) -> Task:
    """Load a task; everything that can be wrong with it is an error here, before a model is loaded.

    Args:
        name: "chain_sum", "products", another reasoning-gym dataset, or the path of a Python file.
        options: keyword arguments of the reasoning-gym dataset.
        dataset: JSONL or Parquet file with the prompts of a Python file's task.
        num_heldout: problems to hold out. At most two thirds of a generated task's distinct problems, and a fifth of a
            user's, are held out.
        num_prompts: prompts that one step takes.
        num_steps: steps of the run; generated tasks draw enough problems for it.
        seed: of the problems and of the split.

    Raises:
        DataError: an unknown task, an unusable file or dataset, or too few prompts.
    """
    if name.endswith(".py"):
        if options:
            raise DataError(f"task_options={options!r}: only reasoning-gym tasks take options, {name!r} is a file")
        data = None if dataset is None else Path(dataset)
        train, heldout, reward = file_task.load(Path(name), data, num_heldout=num_heldout, seed=seed)
    else:
        gym_task.require_known(name)
        if dataset is not None:
            raise DataError(f"dataset={dataset!r}: only a task from a Python file reads a dataset, {name!r} does not")
        # Enough for the run, and for the share held out to be bounded by the space of problems, not by this number.
        wanted = max(num_heldout + num_prompts * num_steps, 2 * num_heldout)
        train, heldout, reward = gym_task.load(
            name, options or {}, num_wanted=wanted, num_heldout=num_heldout, seed=seed
        )
    require_enough(train, num_prompts, f"task={name!r}")
    return Task(name, train, heldout, reward, "mean reward" if name.endswith(".py") else "accuracy")
