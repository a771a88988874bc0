"""What lies in the folder of a run, as far as it got: only metrics and configuration must be there."""

import json
from collections.abc import Sequence
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
    if not isinstance(config, dict) or not isinstance(config.get("run") or {}, dict):
        raise ConfigError(f"{folder / 'config.yaml'}: must hold settings as `logra train` writes them")
    steps = _lines(folder / "metrics.jsonl", needs=("step",))
    if not steps:
        raise ConfigError(f"run={str(folder)!r}: no step has ended yet")
    return Run(
        folder=folder,
        config=config,
        steps=steps,
        samples=_lines(folder / "samples.jsonl", needs=("step", "prompt", "completion")),
        results=_object(folder / "results.json"),
        memory=_object(folder / "memory.json"),
        events=_lines(folder / "events.jsonl"),
    )


def _lines(path: Path, *, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects in a file, one a line. The last line of a run that was killed may be cut off: it is left out."""
    if not path.exists():
        return []
    # Not splitlines(), which also ends lines at characters that a completion may hold: U+2028, U+0085.
    lines = _text(path, errors="replace").removesuffix("\n").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = _parse(line)
        except ValueError as error:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
            continue
        missing = [name for name in needs if name not in value] if isinstance(value, dict) else ["an object"]
        if missing:
            raise ConfigError(f"{path}, line {number}: {', '.join(missing)} missing; `logra train` writes no such line")
        if type(value.get("step", 0)) is not int:
            raise ConfigError(f"{path}, line {number}: step={value['step']!r}: must be an integer")
        found.append(value)
    return found


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = _parse(_text(path, errors="strict"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("heldout") or {}, dict):
        raise ConfigError(f"{path}: not a file that `logra train` writes")
    return value


def _text(path: Path, *, errors: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse(text: str) -> Any:
    """JSON; None for NaN and infinities, and floats for integers of more digits than a float tells apart."""
    return json.loads(text, parse_constant=lambda _: None, parse_int=lambda d: int(d) if len(d) < 18 else float(d))
