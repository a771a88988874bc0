"""The process of one cell: `python -m logra.bench.harness.worker OUTPUT`, with the pickled job on standard input."""

import datetime
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from logra.bench.harness.benchmark import load
from logra.bench.harness.machine import commit, machine
from logra.bench.harness.results import Cell


def measure(module: str, cell: Cell, options: Any) -> dict[str, Any]:
    """Run a cell.

    Returns:
        Its `Record`, all but what only the parent knows.
    """
    revision, dirty = commit()  # before the cell runs: the checkout may move under a long one
    start = time.perf_counter()
    result = load(module).run_cell(cell, options)
    wall_s = time.perf_counter() - start
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "cell": cell,
        "result": result,
        "machine": machine(),
        "commit": revision,
        "dirty": dirty,
        "date": date,
        "wall_s": wall_s,
    }


def main() -> None:
    """Run the job on standard input."""
    Path(sys.argv[1]).write_bytes(pickle.dumps(measure(*pickle.loads(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    main()
