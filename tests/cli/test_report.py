"""`logra report`, and the report at the end of `logra train`."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import yaml

from logra.cli.main import main


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": "logra", "run": {"seed": 0}}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    return folder


def test_the_file_lies_in_the_run_or_where_it_is_told_to(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run_folder)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (run_folder / "report.html").read_text().startswith("<!doctype html>")
    other = shutil.copytree(run_folder, tmp_path / "other")
    assert main(["report", str(run_folder), str(other)]) == 0
    assert (tmp_path / "report.html").exists()
    assert main(["report", str(run_folder), "--output", str(tmp_path / "new" / "x.html")]) == 0
    assert (tmp_path / "new" / "x.html").exists()


def test_errors_are_one_line(run_folder, tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "must be the folder of a run" in capsys.readouterr().err
    assert main(["report", str(run_folder), "--output", str(run_folder / "config.yaml" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_extra_is_named_where_matplotlib_is_missing(run_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(run_folder)]) == 2
    assert "pip install 'logra[report]'" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [False, True])
def test_train_ends_with_a_report_and_never_fails_for_it(run_folder, damage, monkeypatch, capsys):
    outcome = SimpleNamespace(folder=run_folder, interrupted=False, leads=True)
    monkeypatch.setattr("logra.rl.run.train", lambda config: outcome)
    if damage:
        (run_folder / "metrics.jsonl").write_text("[]")
    assert main(["train", "--output-dir", str(run_folder)]) == 0
    assert (run_folder / "report.html").exists() != damage
    assert ("No report was written" if damage else f"Report: {run_folder}") in capsys.readouterr().out
