"""`logra bench`: flags, tables, documentation, regressions."""

import dataclasses
import re
from dataclasses import dataclass

import pytest

from logra.bench.harness import Ratio, Results
from logra.bench.harness.benchmark import Benchmark
from logra.bench.harness.check import read_baselines
from logra.bench.harness.results import Record, add, to_json
from logra.cli import bench
from logra.cli.main import main


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the runs."""
    num_steps: int = 3
    """Steps of each."""


class Stub:
    """A benchmark whose cells need no process, and a record of what was asked of it."""

    def __init__(self):
        self.asked = []
        self.speeds = [2.0]
        self.benchmark = Benchmark(
            name="stub",
            module="stub",
            options=Options,
            cells=lambda options: [{"seed": seed} for seed in options.seeds],
            run_cell=lambda cell, options: {},
            table=lambda results: f"{len(results.records)} cells",
            check=Options(num_steps=1),
            ratios=lambda results: {"speed": Ratio(results.records[0].result["speed"], "higher")},
        )

    def run(self, benchmark, options, path, *, command, jobs=1):
        self.asked.append((options, jobs))
        speed = self.speeds.pop(0) if len(self.speeds) > 1 else self.speeds[0]
        records = [
            Record(
                cell=cell, result={"speed": speed}, machine={}, commit=None, dirty=None, date=None, command=command,
                jobs=jobs, wall_s=0.0,
            )
            for cell in benchmark.cells(options)
        ]  # fmt: skip
        for record in records:
            add(path, "stub", options, record)
        return Results("stub", {}, records)


@pytest.fixture
def stub(monkeypatch, tmp_path):
    stub = Stub()
    monkeypatch.setattr(bench, "run", stub.run)
    monkeypatch.setattr(bench, "find", lambda name: stub.benchmark)
    monkeypatch.setattr(bench, "summaries", lambda: {"stub": "A stub"})
    monkeypatch.chdir(tmp_path)
    return stub


def test_help_lists_the_benchmarks(capsys):
    assert main(["bench", "--help"]) == 0
    assert re.search("learning +Learning curves of every method", capsys.readouterr().out)
    assert main(["bench"]) == 2


def test_an_unknown_benchmark(capsys):
    assert main(["bench", "lerning"]) == 2
    assert "benchmark 'lerning': one of " in capsys.readouterr().err


def test_the_help_of_a_benchmark_shows_its_options(stub, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "stub", "--help"])
    text = capsys.readouterr().out
    assert "--num-steps" in text and "Steps of each. (type: int, default: 3)" in text and "--results-dir" in text


@pytest.mark.parametrize("seeds", [["--seeds", "4", "5"], ["--seeds", "[4, 5]"], ["--seeds=[4,5]"], ["--seeds=4,5"]])
def test_flags_become_options(stub, capsys, seeds):
    assert main(["bench", "stub", *seeds, "--num-steps", "7", "--jobs=2"]) == 0
    assert stub.asked == [(Options(seeds=(4, 5), num_steps=7), 2)]
    assert capsys.readouterr().out == "2 cells\n"


def test_one_value_after_an_equals_sign_is_a_list_of_one(stub):
    assert main(["bench", "stub", "--seeds=0"]) == 0
    assert stub.asked == [(Options(seeds=(0,)), 1)]


def test_an_unknown_flag_is_refused(stub, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "stub", "--num-stepz", "7"])
    assert stop.value.code == 2


def test_a_table_runs_nothing(stub, capsys, tmp_path):
    assert main(["bench", "stub", "--table"]) == 2
    assert "there are no results yet" in capsys.readouterr().err
    main(["bench", "stub"])
    stub.asked.clear()
    (tmp_path / "README.md").write_text("<!-- bench:stub --><!-- /bench:stub -->")
    assert main(["bench", "stub", "--write-docs"]) == 0
    assert (tmp_path / "README.md").read_text() == "<!-- bench:stub -->\n2 cells\n<!-- /bench:stub -->"
    assert stub.asked == []


@pytest.mark.parametrize(
    ("name", "message"), [("stub", "there is nothing to show"), ("other", "of the benchmark 'other', not of 'stub'")]
)
def test_a_table_needs_cells_of_its_benchmark(stub, capsys, tmp_path, name, message):
    (tmp_path / "stub.json").write_text(to_json(Results(name, {})))
    assert main(["bench", "stub", "--table", "--results-dir", "."]) == 2
    assert message in capsys.readouterr().err


def test_a_table_of_a_version_with_other_options_is_refused_by_name(stub, capsys, tmp_path):
    main(["bench", "stub", "--results-dir", "."])
    path = tmp_path / "stub.json"
    path.write_text(path.read_text().replace("num_steps", "num_updates"))
    capsys.readouterr()
    assert main(["bench", "stub", "--table", "--results-dir", "."]) == 2
    assert "with other options (num_steps, num_updates): run it again" in capsys.readouterr().err


def test_a_regression_fails_the_check_after_three_runs(stub, capsys, tmp_path):
    assert main(["bench", "check"]) == 2  # nothing to compare with
    assert main(["bench", "check", "stub", "--save-baseline"]) == 0
    assert read_baselines(tmp_path / "benchmarks" / "baselines" / "stub.json") == {"speed": Ratio(2.0, "higher")}
    stub.asked.clear()
    assert main(["bench", "check"]) == 0
    assert stub.asked == [(Options(num_steps=1), 1)]
    stub.speeds, stub.asked = [1.5, 1.7, 1.6], []
    assert main(["bench", "check"]) == 1
    assert len(stub.asked) == 3
    assert "stub speed: 1.700, the baseline is 2.000 (higher is better): 15% lost" in capsys.readouterr().out


def test_baselines_that_cannot_be_saved_are_refused_before_anything_is_measured(stub, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["bench", "check", "stub", "--save-baseline", "--baselines-dir", "file"]) == 2
    assert "--baselines-dir='file' cannot be written to" in capsys.readouterr().err
    assert stub.asked == []


def test_every_baseline_is_read_before_anything_is_measured(stub, capsys, monkeypatch):
    main(["bench", "check", "stub", "--save-baseline"])
    stub.asked.clear()
    monkeypatch.setattr(bench, "find", lambda name: dataclasses.replace(stub.benchmark, name=name))
    assert main(["bench", "check", "stub", "other"]) == 2
    assert "other.json: there is no baseline yet" in capsys.readouterr().err
    assert stub.asked == []


def test_one_disturbed_run_does_not_fail_the_check(stub):
    main(["bench", "check", "stub", "--save-baseline"])
    stub.speeds = [1.5, 1.9]
    assert main(["bench", "check"]) == 0
