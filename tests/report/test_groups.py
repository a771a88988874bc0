"""Which runs are seeds of one experiment, and what the others are called."""

from logra.report.groups import differences, group_runs
from logra.report.run import load


def groups_of(*folders):
    return group_runs([load(folder) for folder in folders])


def test_runs_that_differ_in_their_seed_alone_are_one_group(make_run):
    runs = make_run("a-0", seed=0), make_run("b-0", rank=8), make_run("a-1", seed=1)
    groups = groups_of(*runs)
    assert [[run.folder.name for run in group.runs] for group in groups] == [["a-0", "a-1"], ["b-0"]]
    assert [group.label for group in groups] == ["a", "b-0"]
    assert differences(groups) == {"logra.rank": [32, 8]}


def test_methods_are_names_where_they_tell_the_groups_apart(make_run):
    assert [g.label for g in groups_of(make_run("x"), make_run("y", method="adamw"))] == ["logra", "adamw"]
    assert [g.label for g in groups_of(make_run("z"))] == ["z"]


def test_equal_names_become_paths(make_run, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    labels = [group.label for group in groups_of(make_run("1/run"), make_run("2/run", rank=8))]
    assert labels == [str(tmp_path / "1/run"), str(tmp_path / "2/run")]
