"""The results file of a benchmark: cells that ran, and what each ran on.

    {"benchmark": NAME, "settings": {...}, "machines": [{cpu, cores, threads, versions...}, ...],
     "cells": [{"cell": {...}, "result": {...}, "machine": index, "commit", "dirty", "date", "command", "jobs", "wall_s"}]}

The file is replaced as a whole, under a lock, and merged with what another process wrote meanwhile.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logra.errors import ConfigError
from logra.sync.durable import locked, try_writing, write_bytes

Cell = dict[str, Any]
"""What makes a cell itself: a flat JSON object of strings, numbers and booleans."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One cell that ran."""

    cell: Cell
    result: dict[str, Any]
    """What `run_cell` returned."""
    machine: dict[str, Any]
    """CPU, cores, threads, versions."""
    commit: str | None
    """On which it ran; None outside a git checkout."""
    dirty: bool | None
    """Whether the package had changes that were not committed."""
    date: str | None
    """When it ended, ISO 8601, UTC."""
    command: str
    """The command line that asked for it."""
    jobs: int | None
    """Cells that ran at the same time."""
    wall_s: float | None
    """Seconds that `run_cell` took."""


@dataclass(frozen=True)
class Results:
    """All cells of one benchmark and one setting."""

    benchmark: str
    settings: dict[str, Any]
    """Options that hold for every cell."""
    records: list[Record] = field(default_factory=list)

    def select(self, **wanted: Any) -> list[dict[str, Any]]:
        """Results of the cells that have these values, in the order of their seeds where they have one."""
        found = [r for r in self.records if all(r.cell.get(name) == value for name, value in wanted.items())]
        return [record.result for record in sorted(found, key=lambda record: record.cell.get("seed", 0))]

    def values(self, name: str) -> list[Any]:
        """The different values that the cells have under a name, in the order of their first appearance."""
        return list(dict.fromkeys(record.cell[name] for record in self.records if name in record.cell))

    def has(self, cell: Cell) -> bool:
        """Whether a cell has run."""
        return any(record.cell == cell for record in self.records)


def settings_of(options: Any) -> dict[str, Any]:
    """The options that hold for every cell: all that are not tuples."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if not isinstance(value, tuple)}


def read(path: Path, benchmark: str | None = None) -> Results:
    """Read a results file.

    Args:
        path: of the file.
        benchmark: whose results it must hold; None: of any.

    Raises:
        ConfigError: there is none, it is not one, or it holds those of another benchmark.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell | {"machine": data["machines"][cell["machine"]]} for cell in data["cells"]]
        results = Results(data["benchmark"], data["settings"], [Record(**cell) for cell in cells])
        objects = [results.settings, *(part for record in results.records for part in (record.cell, record.result))]
        if not all(isinstance(part, dict) for part in objects):
            raise TypeError("settings, and cell and result of every cell, must be objects")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there are no results yet; run the benchmark first") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not a results file: {type(error).__name__}: {error}") from error
    if benchmark is not None and results.benchmark != benchmark:
        raise ConfigError(
            f"{path} holds results of the benchmark {results.benchmark!r}, not of {benchmark!r}: give another --results-dir"
        )
    return results


def read_cells(path: Path, benchmark: str, options: Any) -> Results:
    """Read a results file that there is something to show of.

    Args:
        path: of the file.
        benchmark: whose results it must hold.
        options: of the benchmark; their values may be others.

    Raises:
        ConfigError: see `read`; or the file holds no cells, or those of a version of the benchmark with other options.
    """
    results = read(path, benchmark)
    if not results.records:
        raise ConfigError(f"{path} holds no cells: there is nothing to show; run the benchmark first")
    if different := results.settings.keys() ^ settings_of(options).keys():
        raise ConfigError(
            f"{path} was written by a version of the benchmark with other options ({', '.join(sorted(different))}): run it "
            f"again with another --results-dir"
        )
    return results


def open_results(path: Path, benchmark: str, options: Any) -> Results:
    """The results so far, none if there is no file.

    Raises:
        ConfigError: the file holds cells of another setting or benchmark, or is not a results file.
    """
    settings = settings_of(options)
    if not path.exists():
        return Results(benchmark, settings)
    results = read(path, benchmark)
    different = {
        name: (results.settings.get(name), settings.get(name))
        for name in results.settings.keys() | settings.keys()
        if results.settings.get(name) != settings.get(name)
    }
    if different:
        listed = ", ".join(f"{name}={old!r} there, {new!r} now" for name, (old, new) in sorted(different.items()))
        raise ConfigError(f"{path} holds cells of another setting ({listed}): give another --results-dir, or delete it")
    return results


def add(path: Path, benchmark: str, options: Any, record: Record) -> None:
    """Add a cell to the file.

    Raises:
        ConfigError: as `open_results`.
        OSError: it could not be written; the file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent) as directory:
        results = open_results(path, benchmark, options)
        kept = [other for other in results.records if other.cell != record.cell]
        data = to_json(Results(benchmark, results.settings, [*kept, record]))
        write_bytes(path, data.encode(), directory)


def require_writable(folder: Path, flag: str) -> None:
    """Make a folder and try to write in it, before hours go into what it is to hold.

    Args:
        folder: of results or baselines.
        flag: that named it.

    Raises:
        ConfigError: it cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            try_writing(folder)
    except OSError as error:
        raise ConfigError(f"{flag}={str(folder)!r} cannot be written to: {error}. Give another folder") from error


def to_json(results: Results) -> str:
    """The text of a results file."""
    machines: list[dict[str, Any]] = []
    cells = []
    for record in results.records:
        if record.machine not in machines:
            machines.append(record.machine)
        cells.append(dataclasses.asdict(record) | {"machine": machines.index(record.machine)})
    head = {"benchmark": results.benchmark, "settings": results.settings, "machines": machines, "cells": cells}
    return json.dumps(head, indent=1, allow_nan=False) + os.linesep
