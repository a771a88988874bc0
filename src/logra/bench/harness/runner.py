"""Runs the cells of a benchmark that are missing, several at a time, each in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from logra.bench.harness.benchmark import Benchmark
from logra.bench.harness.results import Cell, Record, Results, add, open_results, require_writable
from logra.bench.harness.worker import encode_job
from logra.errors import LograError


class BenchError(LograError):
    """Cells of a benchmark failed; those that did not are kept."""


def run(
    benchmark: Benchmark, options: Any, path: Path, *, command: str, jobs: int = 1, say: Callable[[str], None] = print
) -> Results:
    """Run what is missing, and keep every cell as it ends.

    Args:
        benchmark: which.
        options: an instance of its `Options`.
        path: the results file.
        command: the command line, for the record.
        jobs: cells at a time.
        say: shows a line of progress.

    Returns:
        All results in the file.

    Raises:
        BenchError: a cell failed. The others ran and are kept.
        ConfigError: the file holds another setting, or its folder cannot be written to.
    """
    results = open_results(path, benchmark.name, options)
    cells = benchmark.cells(options)
    missing = [cell for cell in cells if not results.has(cell)]
    if missing:
        require_writable(path.parent, "--results-dir")
    say(f"{benchmark.name}: {len(cells)} cells, {len(cells) - len(missing)} of them done before")
    failures: list[str] = []
    with _Processes(benchmark, options, command, jobs) as processes, ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(processes.run, cell): cell for cell in missing}
        try:
            for future in as_completed(futures):
                name = describe(futures[future])
                try:
                    record = future.result()
                except BenchError as error:
                    failures.append(f"{name}: {error}")
                    say(f"{name}: failed")
                else:
                    add(path, benchmark.name, options, record)
                    say(f"{name}: {record.wall_s:.1f} s")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise
    if failures:
        raise BenchError(
            f"{len(failures)} of {len(missing)} cells failed; the others are kept.\n" + "\n".join(failures)
        )
    return open_results(path, benchmark.name, options)


def describe(cell: Cell) -> str:
    """A cell in words."""
    return ", ".join(f"{name}={value}" for name, value in cell.items())


class _Processes:
    """Starts a process for every cell, and ends those that are left."""

    def __init__(self, benchmark: Benchmark, options: Any, command: str, jobs: int) -> None:
        self._benchmark = benchmark
        self._options = options
        self._record = {"command": command, "jobs": jobs}
        self._environment = {"OMP_NUM_THREADS": "1"} | os.environ
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, cell: Cell) -> Record:
        """Run one cell.

        Raises:
            BenchError: with the end of what its process wrote to stderr.
        """
        job = encode_job(self._benchmark.module, cell, self._options)
        with tempfile.TemporaryDirectory(prefix="logra-bench-") as folder:
            output = Path(folder, "cell.json")
            command = [sys.executable, "-m", "logra.bench.harness.worker", str(output)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=self._environment,
            )
            self._running.add(process)
            if self._stopped.is_set():
                process.terminate()
            _, errors = process.communicate(job)
            self._running.discard(process)
            if process.returncode != 0 or not output.exists():
                tail = errors.decode(errors="replace").strip().splitlines()[-15:]
                raise BenchError(f"exit code {process.returncode}\n" + "\n".join(f"    {line}" for line in tail))
            return Record(**json.loads(output.read_text(encoding="utf-8")), **self._record)

    def stop(self) -> None:
        """End the processes that run."""
        self._stopped.set()
        for process in list(self._running):
            process.terminate()
