"""The folder of a run: when it may be written, and what its files hold."""

import json
import math

import pytest
import yaml

from logra.errors import ConfigError
from logra.rl.config import TrainConfig
from logra.rl.run_folder import RunFolder


def fill(path):
    folder = RunFolder(path)
    folder.write_config(TrainConfig(output_dir=str(path)))
    folder.add_metrics({"step": 1})
    folder.add_sample({"step": 1})
    folder.write_results({"a": 1})
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    return folder


def test_an_empty_or_a_new_folder_is_taken(tmp_path):
    RunFolder(tmp_path)
    assert RunFolder(tmp_path / "a" / "b").path.is_dir()


def test_another_run_is_refused_and_replaced_on_request(tmp_path):
    path = tmp_path / "run"
    fill(path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        RunFolder(path)
    RunFolder(path, overwrite=True)
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
    folder.add_metrics({"step": 1, "a": math.nan, "b": [math.inf, 1.0]})
    folder.add_metrics({"step": 2})
    lines = folder.metrics.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "a": None, "b": [None, 1.0]}, {"step": 2}]
