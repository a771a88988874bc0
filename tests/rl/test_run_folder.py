"""The folder of a run: when it may be written, and what its files hold."""

import json
import math
import tempfile

import pytest
import yaml

from logra.errors import ConfigError, LograError
from logra.rl.config import TrainConfig
from logra.rl.run_folder import RunFolder


def fill(path):
    folder = RunFolder(path)
    folder.create()
    folder.write_config(TrainConfig(output_dir=str(path)))
    folder.add_metrics({"step": 1})
    folder.add_sample({"step": 1})
    folder.write_results({"a": 1})
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    return folder


def test_an_empty_or_a_new_folder_is_taken(tmp_path):
    RunFolder(tmp_path).create()
    folder = RunFolder(tmp_path / "a" / "b")
    assert not folder.path.exists()
    folder.create()
    assert folder.path.is_dir()


def test_another_run_is_refused_and_replaced_on_request(tmp_path):
    path = tmp_path / "run"
    fill(path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        RunFolder(path)
    before = sorted(path.iterdir())
    folder = RunFolder(path, overwrite=True)
    # Catches an old run that is gone although the new one could not begin.
    assert sorted(path.iterdir()) == before
    folder.create()
    # Catches metrics of two runs in one file, and an overwrite that takes the user's own files along.
    assert [item.name for item in path.iterdir()] == ["notes.txt"]


def test_a_folder_of_something_else_is_never_written(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="holds no run"):
            RunFolder(tmp_path, overwrite=overwrite)
    with pytest.raises(ConfigError, match="this is a file"):
        RunFolder(tmp_path / "thesis.tex")


def test_config_holds_settings_and_versions(tmp_path):
    folder = fill(tmp_path / "run")
    content = yaml.safe_load(folder.config.read_text())
    assert content["rollout"]["num_samples"] == 8
    assert {"python", "platform", "logra", "torch", "transformers", "trl"} <= content["versions"].keys()


def test_records_are_json_without_nan(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.add_metrics({"step": 1, "a": math.nan, "b": [math.inf, 1.0]})
    folder.add_metrics({"step": 2})
    lines = folder.metrics.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "a": None, "b": [None, 1.0]}, {"step": 2}]


@pytest.mark.parametrize("source", ["model", "model/checkpoint", "updates", "samples.jsonl", "../run/model"])
def test_an_input_that_would_be_removed_is_refused(tmp_path, source):
    # `--model run/model --output-dir run --overwrite` would delete the model it is about to train, or has just loaded.
    path = tmp_path / "run"
    folder = fill(path)
    folder.updates.mkdir()
    (folder.model / "checkpoint").mkdir()
    with pytest.raises(ConfigError, match=r"model=.*belongs to the run in.*Copy it"):
        RunFolder(path, overwrite=True).require_outside("model", path / source)


def test_an_input_elsewhere_is_fine(tmp_path):
    path = tmp_path / "run"
    fill(path)
    (path / "mine.jsonl").touch()
    folder = RunFolder(path, overwrite=True)
    for source in (path / "mine.jsonl", tmp_path, "owner/name", path / "no-such-file"):
        folder.require_outside("dataset", source)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output_dir=.*file/run' cannot be written to: .*Not a directory"):
        RunFolder(tmp_path / "file" / "run")


def test_half_a_model_is_never_left_as_the_model(tmp_path):
    folder = fill(tmp_path / "run")
    (folder.model / "config.json").unlink()
    folder.model.rmdir()

    def interrupted(path):
        path.mkdir()
        (path / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.write_model(interrupted)
    assert not folder.model.exists()
    assert "no model was saved" in folder.contents()
    folder.write_model(lambda path: path.mkdir())
    assert folder.contents() == (
        f"{folder.path} holds config.yaml, metrics.jsonl, samples.jsonl, events.jsonl, results.json, model: the trained "
        "model is in model."
    )


def test_what_another_run_left_is_not_called_this_runs(tmp_path):
    path = tmp_path / "run"
    fill(path)
    assert RunFolder(path, overwrite=True).contents() == f"Nothing was written to {path}."


def test_a_folder_that_only_trying_finds_unwritable(tmp_path, monkeypatch):
    for name in ("x" * 300, "a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="cannot be written to"):
            RunFolder(tmp_path / "new" / name)

    def read_only(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(ConfigError, match=r"cannot be written to: .*Read-only"):
        RunFolder(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_a_disk_that_takes_no_more_is_named(tmp_path):
    folder = fill(tmp_path / "run")

    def full(path):
        raise OSError(28, "No space left on device")

    with pytest.raises(LograError, match=r"model' cannot be written: .*No space left"):
        folder.write_model(full)
    folder.results.unlink()
    folder.results.mkdir()
    with pytest.raises(LograError, match=r"results\.json' cannot be written"):
        folder.write_results({})
