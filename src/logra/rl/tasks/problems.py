"""The parts of a task that know nothing of where its problems come from: rows, and the split into train and held out.

A row is what TRL takes: a "prompt" (text, or a list of chat messages) and further columns, which are passed to the
reward function. Two rows are the same problem when their prompts are equal; the split never puts one on both sides.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from logra.errors import DataError

Row = dict[str, Any]

LEAST_REPEATS = 8192
REPEATS_PER_PROBLEM = 16
"""Draws in a row without a new problem that say that all are known. One as likely as the others would be missed with a
chance of exp(-16); of 200, of exp(-40)."""


def prompt_key(row: Row) -> str:
    """The text that identifies a problem."""
    return json.dumps(row["prompt"], sort_keys=True, ensure_ascii=False, default=str)


def distinct(rows: Iterable[Row], *, until_spent: bool = False) -> Iterator[Row]:
    """The first row of each problem, in order.

    Args:
        rows: of problems that may repeat.
        until_spent: rows are drawn at random, without end: stop when the repeats in a row say that there is no other
            problem.
    """
    seen: set[str] = set()
    repeats = 0
    for row in rows:
        key = prompt_key(row)
        if key not in seen:
            seen.add(key)
            repeats = 0
            yield row
            continue
        repeats += 1
        if until_spent and repeats >= max(LEAST_REPEATS, REPEATS_PER_PROBLEM * len(seen)):
            return


def split_heldout(rows: list[Row], num_heldout: int, *, most: float) -> tuple[list[Row], list[Row]]:
    """Hold out the first rows, so that they do not depend on how many others were drawn.

    Args:
        rows: distinct problems in random order.
        num_heldout: how many to hold out.
        most: largest share of the rows that may be held out, in [0, 1).

    Returns:
        Rows to train on, rows held out.
    """
    num_heldout = min(num_heldout, int(len(rows) * most))
    return rows[num_heldout:], rows[:num_heldout]


def require_enough(rows: list[Row], num_prompts: int, source: str) -> None:
    """Refuse too few rows for one step.

    Raises:
        DataError: fewer rows than `num_prompts`.
    """
    if len(rows) < num_prompts:
        raise DataError(
            f"{source} leaves {len(rows)} distinct prompts to train on, but one step takes {num_prompts} "
            f"(rollout.num_prompts). Add prompts, hold out fewer (num_heldout), or lower rollout.num_prompts."
        )
