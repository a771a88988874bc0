"""What lies in the folder of a run, as far as it got: only metrics and configuration must be there."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from logra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Run:
    """The folder of one run, read."""

    folder: Path
    config: dict[str, Any]
    """config.yaml: everything resolved, and versions."""
    steps: list[dict[str, Any]]
    """metrics.jsonl, one entry a step; what could not be measured or is not finite is None or missing."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """samples.jsonl."""
    results: dict[str, Any] = field(default_factory=dict)
    """results.json; empty for a run that has not ended."""
    memory: dict[str, Any] = field(default_factory=dict)
    """memory.json."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """events.jsonl."""

    @property
    def seed(self) -> Any:
        """`run.seed` of the configuration."""
        return (self.config.get("run") or {}).get("seed")


def load(folder: Path) -> Run:
    """Read a run.

    Raises:
        ConfigError: there is no run in the folder, no step has ended, or a file is damaged.
    """
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
        raise ConfigError(
            f"run={str(folder)!r}: must be the folder of a run, with config.yaml and metrics.jsonl in it "
            f"(the --output-dir of `logra train`)"
        )
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder / 'config.yaml'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.yaml'}: must hold settings, but holds a {type(config).__name__}")
    steps = _lines(folder / "metrics.jsonl")
    if not steps:
        raise ConfigError(f"run={str(folder)!r}: no step has ended yet")
    return Run(
        folder=folder,
        config=config,
        steps=steps,
        samples=_lines(folder / "samples.jsonl"),
        results=_object(folder / "results.json"),
        memory=_object(folder / "memory.json"),
        events=_lines(folder / "events.jsonl"),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file, one a line. The last line of a run that was killed may be cut off: it is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
    return found


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
