"""Folders of made-up runs."""

import json
from functools import partial

import pytest
import yaml


def write_run(parent, name, *, seed=0, start=0.1, method="logra", rank=32, num_steps=4, **files):
    """Writes the folder of a run: rewards `start`, `start` + 0.1, ...; further files as lists (.jsonl) or dicts (.json)."""
    folder = parent / name
    folder.mkdir()
    config = {
        "output_dir": str(folder),
        "method": method,
        "run": {"seed": seed},
        "logra": {"rank": rank},
        "versions": {"torch": "2.13.0"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    steps = [
        {
            "step": step,
            "reward/mean": start + 0.1 * (step - 1),
            "trust/planned_kl": 0.01 * step,
            "trust/realised_kl": None if step == 2 else 0.011 * step,
            "time/rollout_s": 1.0,
            "time/update_s": 3.0,
            "time/probe_s": 0.5,
            "sync/seconds": 0.25,
            "sync/bytes": 2048.0,
        }
        for step in range(1, num_steps + 1)
    ]
    lines = {"metrics": steps} | {key: value for key, value in files.items() if isinstance(value, list)}
    for key, records in lines.items():
        (folder / f"{key}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for key, content in files.items():
        if isinstance(content, dict):
            (folder / f"{key}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def make_run(tmp_path):
    """Writes folders of runs."""
    return partial(write_run, tmp_path)


@pytest.fixture(scope="package")
def make_shared_run(tmp_path_factory):
    """The same, for what several tests read."""
    return partial(write_run, tmp_path_factory.mktemp("runs"))
