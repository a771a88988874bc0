"""Reading the folder of a run."""

import json
import re

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


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\r", "\x0c"])
def test_a_completion_may_hold_any_end_of_line(make_run, character):
    """As `logra train` writes them: one object a line, characters as they are."""
    folder = make_run("a")
    sample = {"step": 1, "prompt": "p", "completion": f"a{character}b", "reward": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load(folder).samples == [sample]


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("metrics.jsonl", "{}", "line 5: step missing"),
        ("metrics.jsonl", "5", "line 5: an object missing"),
        ("metrics.jsonl", "null", "line 5: an object missing"),
        ("metrics.jsonl", '{"step": "b"}', "line 5: step='b': must be an integer"),
        ("metrics.jsonl", '{"step": true}', "line 5: step=True: must be an integer"),
        ("metrics.jsonl", '{"step": ' + 400 * "1" + "}", "line 5: step=inf: must be an integer"),
        ("samples.jsonl", '{"step": 1}', "line 1: prompt, completion missing"),
        ("samples.jsonl", '{"step": "<script>", "prompt": "p", "completion": "c"}', "line 1: step='<script>'"),
        ("events.jsonl", '{"step": null, "kind": "k", "action": "a"}', "line 1: step=None: must be an integer"),
        ("results.json", "[]", "not a file that `logra train` writes"),
        ("results.json", '{"heldout": 1}', "not a file that `logra train` writes"),
        ("memory.json", "[]", "not a file that `logra train` writes"),
    ],
)
def test_what_logra_train_would_not_write_is_refused_by_file_and_line(make_run, name, line, says):
    folder = make_run("a")
    with (folder / name).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=re.escape(f"{name}")) as error:
        load(folder)
    assert says in str(error.value)


def test_settings_and_files_that_cannot_be_read_are_named(make_run):
    folder = make_run("a")
    (folder / "samples.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"samples\.jsonl cannot be read"):
        load(folder)
    (folder / "config.yaml").write_text("run: hello\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: must hold settings"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b'{"a": "\xff"}'])
@pytest.mark.parametrize("name", ["results.json", "memory.json"])
def test_a_file_that_is_empty_or_no_text_is_refused(make_run, name, content):
    folder = make_run("a")
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: not JSON"):
        load(folder)


def test_folders_that_hold_no_run_are_refused(make_run, tmp_path):
    with pytest.raises(ConfigError, match="must be the folder of a run"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no step has ended yet"):
        load(make_run("a", num_steps=0))
