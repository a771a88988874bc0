"""The process of one cell: `python -m logra.bench.harness.worker OUTPUT`, with the job as JSON on standard input."""

import dataclasses
import datetime
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
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


def encode_job(module: str, cell: Cell, options: Any) -> bytes:
    """A job as JSON; the fields of `options` are numbers, strings, and tuples of them."""
    return json.dumps({"module": module, "cell": cell, "options": dataclasses.asdict(options)}).encode()


def decode_job(job: bytes) -> tuple[str, Cell, Any]:
    """Module, cell and options that `encode_job` got."""
    content = json.loads(job)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in content["options"].items()}
    return content["module"], content["cell"], load(content["module"]).options(**fields)


def main() -> None:
    """Run the job on standard input. SIGTERM ends it in order: what it started is ended, its temporary files are removed."""
    signal.signal(signal.SIGTERM, _end)
    record = measure(*decode_job(sys.stdin.buffer.read()))
    Path(sys.argv[1]).write_text(json.dumps(record), encoding="utf-8")


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the ending
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
