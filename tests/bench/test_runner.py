"""Cells run once, each in its own process, and survive what happens to the others."""

import json
import os
import signal
import threading

import pytest

from logra.bench import equal_kl_smollm2
from logra.bench.harness import results as files
from logra.bench.harness import runner, worker
from logra.bench.harness.runner import BenchError, run
from logra.errors import ConfigError


def run_toy(toy, path, jobs=1, **options):
    chosen = toy.benchmark.options(**options)
    return run(toy.benchmark, chosen, path, command="logra bench toy", jobs=jobs, say=lambda line: None)


def test_every_cell_has_a_process_of_its_own(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_FAILS", "1")
    with pytest.raises(BenchError, match=r"(?s)1 of 2 cells failed.*seed=1: exit code 1.*RuntimeError: seed 1 fails"):
        run_toy(toy, tmp_path / "toy.json", seeds=(2, 1), jobs=2)
    (record,) = files.read(tmp_path / "toy.json").records
    assert record.result["value"] == 4 and record.result["pid"] != os.getpid()
    assert record.result["threads"] == "1" and record.machine["threads"] == 1
    assert record.machine["cores"] >= 1 and record.machine["torch"]
    assert record.command == "logra bench toy" and record.jobs == 2 and record.wall_s is not None
    assert record.commit is None or len(record.commit) == 40


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_this_process_alone_ends_what_the_cells_started(toy, tmp_path, monkeypatch, number):
    """The fifo ends when nobody holds it any more. Catches processes that go on, and waiting for them."""
    fifo, said = tmp_path / "fifo", []
    os.mkfifo(fifo)
    monkeypatch.setenv("TOY_FIFO", str(fifo))
    own_thread = threading.get_ident()

    def watch():
        with fifo.open() as lines:
            said.append(lines.readline())
            signal.pthread_kill(own_thread, number)
            said.extend(lines)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    # SIGTERM must not end the tests where it is not handled, and SIGINT is ignored in a shell's background jobs.
    handlers = {signal.SIGTERM: lambda number, frame: None, signal.SIGINT: signal.default_int_handler}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(KeyboardInterrupt):
            run_toy(toy, tmp_path / "toy.json", seeds=(2,))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    watcher.join()
    assert said == ["started\n"]
    assert not (tmp_path / "toy.json").exists()


def test_cells_run_once(toy, tmp_path, in_this_process):
    path = tmp_path / "toy.json"
    run_toy(toy, path, seeds=(2,))
    results = run_toy(toy, path, seeds=(2, 3))
    assert toy.log.read_text().split() == ["2", "3"]  # seed 2 not a second time
    assert [record.result["value"] for record in results.records] == [4, 9]
    assert len(json.loads(path.read_text())["machines"]) == 1  # written once, not with every cell


def test_a_failed_cell_does_not_cost_the_others(toy, tmp_path, monkeypatch, in_this_process):
    path = tmp_path / "toy.json"
    monkeypatch.setenv("TOY_FAILS", "1")
    with pytest.raises(BenchError, match="1 of 3 cells failed"):
        run_toy(toy, path, seeds=(0, 1, 2))
    assert files.read(path).values("seed") == [0, 2]
    monkeypatch.delenv("TOY_FAILS")
    assert sorted(run_toy(toy, path, seeds=(0, 1, 2)).values("seed")) == [0, 1, 2]
    assert toy.log.read_text().split() == ["0", "1", "2", "1"]


def test_a_file_holds_one_setting(toy, tmp_path, in_this_process):
    path = tmp_path / "toy.json"
    run_toy(toy, path, seeds=(2,))
    with pytest.raises(ConfigError, match=r"factor=1\.0 there, 2\.0 now"):
        run_toy(toy, path, seeds=(2,), factor=2.0)
    assert files.read(path).select(seed=2)[0]["value"] == 4


def test_what_another_process_wrote_meanwhile_is_kept(toy, tmp_path, in_this_process):
    path, options = tmp_path / "toy.json", toy.benchmark.options()
    record = run_toy(toy, path, seeds=(2,)).records[0]
    other = files.Record(**(vars(record) | {"cell": {"arm": "square", "seed": 7}}))
    files.add(path, toy.benchmark.name, options, other)
    assert run_toy(toy, path, seeds=(3,)).values("seed") == [2, 7, 3]


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_cell(toy, tmp_path, in_this_process):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"--results-dir='{folder}' cannot be written to"):
            run_toy(toy, folder / "toy.json")
    assert not toy.log.exists()


def test_results_that_are_complete_need_no_folder_to_write_to(toy, tmp_path, monkeypatch, in_this_process):
    run_toy(toy, tmp_path / "toy.json", seeds=(2,))
    monkeypatch.setattr(runner, "require_writable", lambda folder, flag: pytest.fail("nothing is to be written"))
    assert run_toy(toy, tmp_path / "toy.json", seeds=(2,)).values("seed") == [2]


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_are_at_least_one(toy, tmp_path, jobs):
    with pytest.raises(ConfigError, match=f"--jobs={jobs}: at least 1"):
        run_toy(toy, tmp_path / "toy.json", jobs=jobs)


def test_seeds_are_not_negative(toy, tmp_path):
    with pytest.raises(ConfigError, match=r"seeds=\(0, -1\): at least 0"):
        run_toy(toy, tmp_path / "toy.json", seeds=(0, -1))


def test_nothing_to_run_is_refused(toy, tmp_path):
    with pytest.raises(ConfigError, match="toy_squares: nothing to run: give at least one value for seeds"):
        run_toy(toy, tmp_path / "toy.json", seeds=())


def test_a_cell_that_is_asked_for_twice_runs_once(toy, tmp_path, in_this_process):
    assert run_toy(toy, tmp_path / "toy.json", seeds=(2, 3, 2)).values("seed") == [2, 3]
    assert sorted(toy.log.read_text().split()) == ["2", "3"]


def test_results_of_another_benchmark_are_refused(toy, tmp_path, in_this_process):
    path = tmp_path / "toy.json"
    text = files.to_json(files.Results("cubes", {"factor": 1.0}))
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds results of the benchmark 'cubes', not of 'toy_squares'"):
        run_toy(toy, path)
    assert path.read_text() == text and not toy.log.exists()


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"benchmark": "toy"}', '{"benchmark": "toy_squares", "settings": [1], "machines": [], "cells": []}',
        '{"benchmark": "toy_squares", "settings": {"factor": 1.0}, "machines": [{}], "cells": [{"cell": 1, "result": {}, '
        '"machine": 0, "commit": null, "dirty": null, "date": null, "command": "", "jobs": 1, "wall_s": 0}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_and_left(toy, tmp_path, text, in_this_process):
    path = tmp_path / "toy.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a results file"):
        run_toy(toy, path)
    assert path.read_text() == text


def test_a_job_arrives_as_it_was_sent():
    """Tuples are lists in JSON. Catches options that reach the cell with other types than a caller gives."""
    options = equal_kl_smollm2.Options(seeds=(1, 2), kl_budget=0.5)
    job = worker.encode_job(equal_kl_smollm2.__name__, {"arm": "spectral-32", "seed": 1}, options)
    assert worker.decode_job(job) == (equal_kl_smollm2.__name__, {"arm": "spectral-32", "seed": 1}, options)
