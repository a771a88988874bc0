"""Tasks from reasoning-gym: problems are generated offline, answers are scored by the dataset's own verifier.

`chain_sum` and `products` are set up for a small model: two terms of one digit, a chat prompt "a + b = ?", and a reward
of 1 exactly when the last number of the completion is the answer.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from logra.errors import DataError
from logra.rl.rewards import completion_text, last_integer
from logra.rl.tasks.problems import Row, distinct, split_heldout

ARITHMETIC = ("chain_sum", "products")
ARITHMETIC_OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

MOST_HELDOUT = 2 / 3
"""Largest share of the distinct problems that is held out: there are only 200 sums of two digits, and 100 products."""

MIN_DRAWS = 2048
"""Problems drawn at least: enough to meet each of 200 distinct ones (10 draws each; 0.01 are missed on average)."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def known_names() -> list[str]:
    """Names of all reasoning-gym datasets."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def require_known(name: str) -> None:
    """Refuse an unknown task.

    Raises:
        DataError: with the names that come closest.
    """
    names = known_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"Did you mean {', '.join(close)}?" if close else f"For example: {', '.join(ARITHMETIC)}."
        raise DataError(
            f"task={name!r}: neither a reasoning-gym dataset nor a Python file. {hint} "
            f"There are {len(names)} datasets; a file must end in .py."
        )


def load(
    name: str, options: dict[str, Any], *, num_wanted: int, num_heldout: int, seed: int
) -> tuple[list[Row], list[Row], Callable[..., list[float]]]:
    """Draw problems and split them.

    Args:
        name: of the dataset.
        options: keyword arguments of the dataset, see reasoning-gym.
        num_wanted: distinct problems to draw. Where there are fewer, drawing ends when no new one has come for long.
        num_heldout: of which to hold out, at most two thirds.
        seed: of the problems.

    Returns:
        Rows to train on; rows held out, disjoint by prompt; the reward function. Columns: prompt, answer, index.

    Raises:
        DataError: the dataset does not take these options.
    """
    import reasoning_gym

    settings = (ARITHMETIC_OPTIONS if name in ARITHMETIC else {}) | options
    # Entry i is drawn from seed + i, so neighbouring seeds would share nearly all problems.
    first_seed = (seed * 1_000_003) % 2**31
    try:
        dataset = reasoning_gym.create_dataset(name, size=max(MIN_DRAWS, 4 * num_wanted), seed=first_seed, **settings)
        drawn = islice(distinct(_rows(name, dataset), until_spent=True), num_wanted)
        train, heldout = split_heldout(list(drawn), num_heldout, most=MOST_HELDOUT)
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"task={name!r} does not accept task_options={options!r}: {error}") from error
    return train, heldout, last_number_reward if name in ARITHMETIC else VerifierReward(name, dataset)


def _rows(name: str, dataset: Any) -> Iterator[Row]:
    for index in range(len(dataset)):
        yield _row(name, dataset[index], index)


def _row(name: str, entry: dict[str, Any], index: int) -> Row:
    if name in ARITHMETIC:
        question = f"{entry['metadata']['expression']} = ?"
    else:
        question = entry["question"]
    return {"prompt": [{"role": "user", "content": question}], "answer": str(entry["answer"]), "index": index}


def last_number_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1.0 where the last integer of the completion is the answer, else 0.0."""
    return [
        float(last_integer(completion_text(completion)) == int(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


class VerifierReward:
    """1.0 where the dataset's verifier gives full marks to the completion, else 0.0.

    Verifiers give partial credit for a well-formed wrong answer, and some raise on text they do not expect: both
    count as 0. Where the completion holds an <answer>...</answer>, only the last one is scored.

    Args:
        name: of the dataset.
        dataset: the reasoning-gym dataset that the rows' `index` refers to.
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self.__name__ = f"{name}_verifier"
        self._dataset = dataset

    def __call__(self, completions: list[Any], index: list[int], **_: Any) -> list[float]:
        """TRL's calling convention: dataset columns arrive as lists."""
        return [self._score(completion_text(text), i) for text, i in zip(completions, index, strict=True)]

    def _score(self, text: str, index: int) -> float:
        marked = _ANSWER.findall(text)
        answer = (marked[-1] if marked else text).strip()
        try:
            return float(self._dataset.score_answer(answer, self._dataset[index]) >= 1.0)
        except Exception:  # a verifier meets whatever a policy writes, and some raise on it
            return 0.0
