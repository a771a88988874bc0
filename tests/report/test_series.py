"""Means and bands over seeds."""

import pytest

from logra.report.groups import group_runs
from logra.report.memory import memory_stacks, phase_seconds, time_stacks
from logra.report.run import load
from logra.report.series import Band, curve, heldout, metric


def test_a_band_is_mean_and_range_where_any_run_has_a_value(make_run):
    runs = [load(make_run("a", start=0.1)), load(make_run("b", start=0.3, seed=1, num_steps=2))]
    (group,) = group_runs(runs)
    found = curve(group, metric("reward/mean", 10.0))
    assert found.steps == [1, 2, 3, 4]
    assert found.mean == pytest.approx([2.0, 3.0, 3.0, 4.0])
    assert (found.low, found.high) == (pytest.approx([1.0, 2.0, 3.0, 4.0]), pytest.approx([3.0, 4.0, 3.0, 4.0]))


def test_what_was_not_measured_is_left_out(make_run):
    (group,) = group_runs([load(make_run("a"))])
    assert curve(group, metric("trust/realised_kl")).steps == [1, 3, 4]
    assert not curve(group, metric("trust/alpha"))


def test_heldout_scores_stand_before_the_first_step_and_after_the_last(make_run):
    runs = [
        make_run(name, seed=s, results={"heldout": {"before": 0.2, "after": 0.4 + s}}) for s, name in enumerate("ab")
    ]
    (group,) = group_runs([load(run) for run in runs])
    assert heldout(group) == Band([0, 4], [0.2, pytest.approx(0.9)], [0.2, 0.4], [0.2, 1.4])


def test_time_is_split_without_counting_twice(make_run):
    run = load(make_run("a"))
    assert phase_seconds(run) == [1.0, 2.25, 0.5, 0.25]  # of 3 s of update, 0.5 s are the probe's and 0.25 s publish
    stacks = time_stacks(group_runs([run]))
    assert stacks is not None and stacks.rows == [("a", [1.0, 2.25, 0.5, 0.25])]


def test_memory_of_many_categories(make_run):
    sizes = {f"part_{index}": (10 - index) * 2**20 for index in range(10)}
    memory = {"phases": {"forward": {"peak_bytes": 0, "at_peak": sizes}}, "resident": {"part_9": 2**21}}
    stacks = memory_stacks(group_runs([load(make_run("a", memory=memory))]))
    assert stacks is not None and stacks.unit == "MiB"
    assert stacks.categories == [f"part {index}" for index in range(7)] + ["all other"]
    assert stacks.rows == [("forward", [10, 9, 8, 7, 6, 5, 4, 3 + 2 + 1]), ("between steps", [0] * 7 + [2])]
    assert memory_stacks(group_runs([load(make_run("b"))])) is None
