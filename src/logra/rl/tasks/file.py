"""A task from a Python file of the user's: a reward function, and prompts from the file or from a dataset on disk.

# my_task.py
def dataset():                                   # or --dataset prompts.jsonl / prompts.parquet
    return [{"prompt": "2 + 3 =", "answer": "5"}, ...]

def reward(completions, answer, **kwargs):       # TRL's convention: one value per completion, columns as lists
    return [float(a in c) for c, a in zip(completions, answer)]
"""

import importlib.util
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from logra.errors import DataError
from logra.rl.tasks.problems import Row, distinct, split_heldout

MOST_HELDOUT = 1 / 5
"""Largest share of the user's prompts that is held out."""

TRL_ARGUMENTS = {
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
}
"""What TRL passes to a reward function besides the columns of the dataset."""

RESERVED = TRL_ARGUMENTS | {"completion", "image", "images"}
"""Columns that TRL would overwrite, drop, or read as pictures."""


def load(
    file: Path, data: Path | None, *, num_heldout: int, seed: int
) -> tuple[list[Row], list[Row], Callable[..., Any]]:
    """Import the file, read the prompts, split them.

    Args:
        file: Python file with `reward(...)`, and `dataset()` unless `data` is given.
        data: JSONL or Parquet file with a "prompt" column.
        num_heldout: prompts to hold out, at most a fifth.
        seed: of the order, which decides what is held out.

    Returns:
        Rows to train on; rows held out, disjoint by prompt; the reward function.

    Raises:
        DataError: no file, no reward function, no prompts, no "prompt" column, a prompt that is neither text nor chat, a
            column of a reserved name, or a reward function that asks for a column that the dataset does not have.
    """
    module = _import(file)
    reward = getattr(module, "reward", None)
    if not callable(reward):
        raise DataError(
            f"task={str(file)!r} defines no function `reward(completions, **kwargs)`: define one that "
            f"returns a number for each completion"
        )
    rows, source = _rows(module, file, data)
    rows = _with_all_columns(distinct(_check_rows(rows, source)))
    _check_reward_columns(reward, rows[0], file)
    random.Random(seed).shuffle(rows)
    train, heldout = split_heldout(rows, num_heldout, most=MOST_HELDOUT)
    return train, heldout, reward


def _import(file: Path) -> ModuleType:
    if not file.is_file():
        raise DataError(f"task={str(file)!r}: there is no such file")
    spec = importlib.util.spec_from_file_location("logra_task", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the task look their module up by name
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for its imports of its neighbours; last, so that these hide no installed package
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise DataError(f"task={str(file)!r} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _rows(module: ModuleType, file: Path, data: Path | None) -> tuple[Iterable[Any], str]:
    """The rows as given, and where they come from (for messages)."""
    if data is not None:
        return read_rows(data), f"dataset={str(data)!r}"
    function: Callable[[], Iterable[Any]] | None = getattr(module, "dataset", None)
    if not callable(function):
        raise DataError(f"task={str(file)!r} defines no function `dataset()`: define one, or give --dataset")
    source = f"dataset() of task={str(file)!r}"
    try:
        return list(function()), source
    except (Exception, SystemExit) as error:
        raise DataError(f"{source} failed: {type(error).__name__}: {error}") from error


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSONL or Parquet file.

    Raises:
        DataError: no such file, another format, a damaged file, or a line that is not JSON.
    """
    if not path.is_file():
        raise DataError(f"dataset={str(path)!r}: there is no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"dataset={str(path)!r}: not a Parquet file ({error})") from error
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        raise DataError(f"dataset={str(path)!r}: a .jsonl or .parquet file is needed")
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"dataset={str(path)!r} cannot be read: {error}") from error
    rows: list[Row] = []
    # Not splitlines(), which also breaks at characters that JSON allows inside a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            beyond = _too_large(row)
        except json.JSONDecodeError as error:
            raise DataError(f"dataset={str(path)!r}, line {number}: not JSON ({error})") from None
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise DataError(f"dataset={str(path)!r}, line {number} cannot be read: {error}") from None
        if beyond is not None:
            raise DataError(
                f"dataset={str(path)!r}, line {number}: the column {beyond!r} holds an integer beyond 64 bits. Write it as a "
                f"text"
            )
        rows.append(row)
    return rows


def _too_large(row: Any) -> str | None:
    """A column with an integer that a table does not take."""
    columns = row.items() if isinstance(row, dict) else ()
    return next((name for name, value in columns if _has_large_integer(value)), None)


def _has_large_integer(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_has_large_integer, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _check_rows(rows: Iterable[Any], source: str) -> list[Row]:
    checked = list(rows)
    if not checked:
        raise DataError(f"{source} is empty: it must hold at least one prompt")
    for number, row in enumerate(checked, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{source}, row {number}: {type(row).__name__}, but a row is an object with a prompt")
        if "prompt" not in row:
            raise DataError(
                f"{source}, row {number} has no column 'prompt'. Its columns: {', '.join(map(str, row)) or 'none'}"
            )
        if not _is_prompt(row["prompt"]):
            raise DataError(
                f"{source}, row {number}: prompt={row['prompt']!r} must be a text, or a list of chat messages "
                f'{{"role": text, "content": text}}, and not empty'
            )
        if reserved := RESERVED & row.keys():
            raise DataError(
                f"{source}, row {number}: a column cannot be named {', '.join(sorted(reserved))}: TRL uses the name. "
                f"Rename it"
            )
    return checked


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
    )


def _with_all_columns(rows: Iterable[Row]) -> list[Row]:
    """The rows, each with the columns of all of them, None where it has none: a table takes its columns from the first."""
    found = list(rows)
    columns = dict.fromkeys(name for row in found for name in row)
    return [{name: row.get(name) for name in columns} for row in found]


def _check_reward_columns(reward: Callable[..., Any], row: Row, file: Path) -> None:
    """Refuse a reward function that needs an argument which nobody passes."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # a builtin or C function tells nothing about its arguments
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise DataError(
            f"task={str(file)!r}: `reward` must accept **kwargs, since TRL also passes it {', '.join(sorted(TRL_ARGUMENTS))}"
        )
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in _VARIABLE
        if required and parameter.name not in TRL_ARGUMENTS | row.keys():
            raise DataError(
                f"task={str(file)!r}: `reward` needs {parameter.name!r}, but the dataset has no such column. "
                f"Its columns: {', '.join(row)}"
            )


_VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
