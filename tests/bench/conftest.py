"""A benchmark of a few milliseconds a cell, in a module that processes can import."""

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from logra.bench.harness import benchmark as benchmarks
from logra.bench.harness import runner, worker
from logra.bench.harness.results import Record

SOURCE = '''
"""Squares of seeds."""

import os
import subprocess
from dataclasses import dataclass

from logra.bench.harness import Cell, Results, markdown_table, spread


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds."""
    factor: float = 1.0
    """Multiplies, no unit."""


def cells(options: Options) -> list[Cell]:
    return [{"arm": "square", "seed": seed} for seed in options.seeds]


def run_cell(cell: Cell, options: Options) -> dict:
    with open(os.environ["TOY_LOG"], "a") as log:
        log.write(f"{cell['seed']} ")
    if fifo := os.environ.get("TOY_FIFO"):  # a process of the cell's own, which tells how far it came
        with open(fifo, "w") as output:
            subprocess.run(["sh", "-c", "echo started; sleep 60; echo finished"], stdout=output)
    if cell["seed"] == 1 and os.environ.get("TOY_FAILS"):
        raise RuntimeError("seed 1 fails")
    return {"value": cell["seed"] ** 2 * options.factor, "threads": os.environ.get("OMP_NUM_THREADS"), "pid": os.getpid()}


def table(results: Results) -> str:
    return markdown_table(["arm", "value"], [["square", spread([r["value"] for r in results.select(arm="square")])]])
'''


@dataclass(frozen=True)
class Toy:
    benchmark: benchmarks.Benchmark
    log: Path
    """Seeds of the cells that ran, in their order."""


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    Path(folder, "toy_squares.py").write_text(textwrap.dedent(SOURCE))
    return folder


@pytest.fixture
def in_this_process(monkeypatch):
    """Cells run without a process of their own, which takes seconds to import torch."""

    def run_here(processes, cell):
        try:
            return Record(**worker.measure("toy_squares", cell, processes._options), **processes._record)
        except RuntimeError as error:
            raise runner.BenchError("exit code 1") from error

    monkeypatch.setattr(runner._Processes, "run", run_here)


@pytest.fixture
def toy(toy_folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(toy_folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(toy_folder), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Toy(benchmarks.load("toy_squares"), tmp_path / "log")
