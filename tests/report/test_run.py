"""Reading the folder of a run."""

import pytest

from logra.errors import ConfigError
from logra.report.run import load


def test_what_is_not_there_is_empty(make_run):
    run = load(make_run("a", seed=3))
    assert (run.seed, len(run.steps)) == (3, 4)
    assert (run.samples, run.results, run.memory, run.events) == ([], {}, {}, [])


def test_a_line_cut_off_by_a_kill_is_left_out(make_run):
    folder = make_run("a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert [step["step"] for step in load(folder).steps] == [1, 2, 3, 4]


def test_a_damaged_line_is_named(make_run):
    folder = make_run("a")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("{\n" + text)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 1: not JSON"):
        load(folder)


def test_folders_that_hold_no_run_are_refused(make_run, tmp_path):
    with pytest.raises(ConfigError, match="must be the folder of a run"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no step has ended yet"):
        load(make_run("a", num_steps=0))
