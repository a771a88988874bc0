"""The parts of a task that know nothing of where its problems come from: rows, and the split into train and held out.

A row is what TRL takes: a "prompt" (text, or a list of chat messages) and further columns, which are passed to the
reward function. Two rows are the same problem when their prompts are equal; the split never puts one on both sides.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from logra.errors import DataError

Row = dict[str, Any]


def prompt_key(row: Row) -> str:
    """The text that identifies a problem."""
    return json.dumps(row["prompt"], sort_keys=True, ensure_ascii=False, default=str)


def distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """The first row of each problem, in order."""
    seen: set[str] = set()
    for row in rows:
        key = prompt_key(row)
        if key not in seen:
            seen.add(key)
            yield row


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
