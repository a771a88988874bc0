"""The folder of a run: what lies where, when it may be written, and the files that grow with every step.

config.yaml      everything resolved, and the versions of what it ran with; --config reads it back
metrics.jsonl    one object per step
samples.jsonl    a few completions of every step, with prompt and reward
model/           the trained model, for AutoModelForCausalLM.from_pretrained
results.json     held-out score before and after, mean rewards, seconds, peak memory
"""

import importlib.metadata
import json
import math
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from logra.errors import ConfigError
from logra.rl.config import TrainConfig, to_dict

VERSIONED_PACKAGES = ("logra", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "reasoning-gym")


class RunFolder:
    """Creates the folder of a run and writes its files.

    Args:
        path: the folder.
        overwrite: replace the run that lies there.

    Raises:
        ConfigError: the folder holds a run and `overwrite` is off, or it holds files that are not a run's.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.model = self.path / "model"
        self.results = self.path / "results.json"
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir={str(self.path)!r}: this is a file, a folder is needed")
        if self.path.is_dir() and any(self.path.iterdir()):
            self._make_room(overwrite)
        self.path.mkdir(parents=True, exist_ok=True)

    def _make_room(self, overwrite: bool) -> None:
        if not self.config.is_file():
            raise ConfigError(
                f"output_dir={str(self.path)!r}: the folder is not empty and holds no run. Choose another folder."
            )
        if not overwrite:
            raise ConfigError(
                f"output_dir={str(self.path)!r}: the folder holds another run. Choose another folder, or replace that "
                f"run with --overwrite."
            )
        # Only what a run writes is removed: whatever else was put here stays.
        for file in (self.config, self.metrics, self.samples, self.results):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.model, ignore_errors=True)

    def write_config(self, config: TrainConfig) -> None:
        """Write the resolved configuration and the versions it runs with."""
        content = to_dict(config) | {"versions": versions()}
        self.config.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one step's metrics."""
        _append(self.metrics, metrics)

    def add_sample(self, sample: Mapping[str, Any]) -> None:
        """Append one completion."""
        _append(self.samples, sample)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write the results of the run."""
        self.results.write_text(json.dumps(_finite(results), indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of Python, the platform and the packages that decide what a run computes."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line and flush it: what is in the file survives an interruption."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(record), ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """`value` with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
