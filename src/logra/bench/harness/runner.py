"""Runs the cells of a benchmark that are missing, several at a time, each in a process of its own.

Each process leads a session, which the processes that it starts belong to: they end with it. No signal of the terminal
reaches them by itself.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from logra.bench.harness.benchmark import Benchmark
from logra.bench.harness.results import Cell, Record, Results, add, open_results, require_writable
from logra.bench.harness.worker import encode_job
from logra.errors import ConfigError, LograError

_STOP_S = 10.0
"""Seconds that a process has to end what it started and remove its files, before it is killed."""


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
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; the processes of the cells have ended.
        ConfigError: `jobs` is below 1, there is nothing to run, the file holds another setting or benchmark, or its folder
            cannot be written to.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs={jobs}: at least 1")
    if any(seed < 0 for seed in getattr(options, "seeds", ())):
        raise ConfigError(f"seeds={options.seeds!r}: at least 0")
    results = open_results(path, benchmark.name, options)
    cells = different_cells(benchmark, options)
    missing = [cell for cell in cells if not results.has(cell)]
    if missing:
        require_writable(path.parent, "--results-dir")
    say(f"{benchmark.name}: {len(cells)} cells, {len(cells) - len(missing)} of them done before")
    failures: list[str] = []
    with (
        _interrupted_by_signals(),
        _Processes(benchmark, options, command, jobs) as processes,
        ThreadPoolExecutor(jobs) as pool,
    ):
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


def different_cells(benchmark: Benchmark, options: Any) -> list[Cell]:
    """The cells that the options ask for, each once.

    Raises:
        ConfigError: they ask for none.
    """
    cells: list[Cell] = []
    for cell in benchmark.cells(options):
        if cell not in cells:
            cells.append(cell)
    if not cells:
        empty = [field.name for field in dataclasses.fields(options) if getattr(options, field.name) == ()]
        raise ConfigError(f"{benchmark.name}: nothing to run: give at least one value for {' or '.join(empty)}")
    return cells


def describe(cell: Cell) -> str:
    """A cell in words."""
    return ", ".join(f"{name}={value}" for name, value in cell.items())


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP interrupt as Ctrl-C does; only the main thread may say so. Those ignored (nohup) stay so."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"{signal.Signals(number).name}: the cells that ended are kept")

    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
            output, errors = Path(folder, "cell.json"), Path(folder, "stderr")
            command = [sys.executable, "-m", "logra.bench.harness.worker", str(output)]
            with errors.open("wb") as log:  # no pipe: what outlives the process would hold it open
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
            self._running.add(process)
            if self._stopped.is_set():
                _signal_group(process, signal.SIGKILL)
            process.communicate(job)
            self._running.discard(process)
            _signal_group(process, signal.SIGKILL)  # what it started and left
            if process.returncode != 0 or not output.exists():
                tail = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
                raise BenchError(f"exit code {process.returncode}\n" + "\n".join(f"    {line}" for line in tail))
            return Record(**json.loads(output.read_text(encoding="utf-8")), **self._record)

    def stop(self) -> None:
        """End the processes that run, and what they started: they are asked to, then killed."""
        self._stopped.set()
        running = list(self._running)
        deadline = time.monotonic() + _STOP_S
        try:
            for process in running:
                _signal_group(process, signal.SIGTERM)
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.0))
        finally:  # after a second Ctrl-C too
            for process in running:
                if process.returncode is None:
                    _signal_group(process, signal.SIGKILL)


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Send a signal to a process that leads a group and to all others of the group, if any is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
