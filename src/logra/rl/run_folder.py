"""The folder of a run: what lies where, when it may be written, and the files that grow with every step.

config.yaml      everything resolved, and the versions of what it ran with; --config reads it back
metrics.jsonl    one object per step
samples.jsonl    a few completions of every step, with prompt and reward
events.jsonl     what the guards noticed and did, one object per event, see docs/long-runs.md
updates/         the log of all updates: with the base model, the weights of every step (methods logra and paper)
checkpoints/     what --resume continues from, see `logra.checkpoint`
model/           the trained model, for AutoModelForCausalLM.from_pretrained
memory.json      bytes by category, see docs/memory.md
results.json     held-out score before and after, mean rewards, seconds, peak memory
report.html      curves, memory, events and completions on one page (written by the command line)
"""

import importlib.metadata
import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from logra.checkpoint.store import TEMPORARY_PREFIX, fsync, replace_text
from logra.errors import ConfigError, LograError
from logra.rl.config import TrainConfig, to_dict
from logra.sync.durable import try_writing

VERSIONED_PACKAGES = ("logra", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "reasoning-gym")


class RunFolder:
    """The folder of a run. Built, it has tried to write and left nothing; `create` makes room for the run and begins it,
    `reopen` continues the one that lies there.

    Args:
        path: the folder.
        overwrite: replace the run that lies there, when `create` is called.
        resume: allow a run to lie there.

    Raises:
        ConfigError: the folder holds a run and `overwrite` is off, it holds files that are not a run's, or it cannot be
            written.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self._name_parts(Path(path))
        try:
            is_file = self.path.exists() and not self.path.is_dir()
            if not is_file:
                try_writing(self.path)
        except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
            raise ConfigError(f"output_dir={str(self.path)!r} cannot be written to: {error}") from error
        if is_file:
            raise ConfigError(f"output_dir={str(self.path)!r}: this is a file, a folder is needed")
        if self.path.is_dir() and any(self.path.iterdir()):
            self._require_replaceable(overwrite or resume)

    def _name_parts(self, path: Path) -> None:
        self.path = path
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.events = self.path / "events.jsonl"
        self.updates = self.path / "updates"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.memory = self.path / "memory.json"
        self.results = self.path / "results.json"
        self.report = self.path / "report.html"
        self._unfinished_model = self.path / ".model-unfinished"
        self._is_created = False

    def _require_replaceable(self, overwrite: bool) -> None:
        if not self.config.is_file():
            raise ConfigError(
                f"output_dir={str(self.path)!r}: the folder is not empty and holds no run. Choose another folder."
            )
        if not overwrite:
            raise ConfigError(
                f"output_dir={str(self.path)!r}: the folder holds another run. Choose another folder, continue that run "
                f"with --resume auto, or replace it with --overwrite."
            )

    @property
    def _parts(self) -> tuple[Path, ...]:
        """What a run writes, and what replacing it removes: whatever else was put here stays."""
        files = (self.config, self.metrics, self.samples, self.events, self.memory, self.results, self.report)
        return (*files, self.updates, self.checkpoints, self.model, self._unfinished_model)

    def require_outside(self, field: str, source: str | Path) -> None:
        """Refuse an input of the run that `create` would remove.

        Raises:
            ConfigError: `source`, the value of `field`, is part of the run that lies in this folder.
        """
        path = Path(source)
        if not path.exists():
            return
        for part in self._parts:
            if path.resolve().is_relative_to(part.resolve()):
                raise ConfigError(
                    f"{field}={str(source)!r}: this belongs to the run in {str(self.path)!r}, which is to be replaced. Copy "
                    f"it, or choose another output_dir."
                )

    def create(self) -> None:
        """Remove the run that lies here, if there is one, and begin the new one.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for part in self._parts:
                if part.is_dir() and not part.is_symlink():
                    shutil.rmtree(part)
                else:
                    part.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir={str(self.path)!r}: {error}") from error
        self._is_created = True

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here: its configuration is written before its first step."""
        return self.config.is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process trains in this folder. The system releases the lock when its holder dies.

        Raises:
            ConfigError: another one does.
        """
        import fcntl

        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"output_dir={str(self.path)!r}: another process is training here. Stop it, or choose another folder."
                ) from error
            yield
        finally:
            os.close(descriptor)
            for folder in missing:  # a run that never began leaves no empty folder
                with suppress(OSError):
                    folder.rmdir()

    def require_space(self, num_bytes: int) -> None:
        """Refuse a disk that cannot hold what the run writes.

        Args:
            num_bytes: that are needed at least.

        Raises:
            ConfigError: less is free.
        """
        existing = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if free < num_bytes:
            raise ConfigError(
                f"output_dir={str(self.path)!r}: {free / 2**30:.2f} GiB are free, but the trained model and the checkpoints "
                f"take about {num_bytes / 2**30:.2f} GiB. Free some space, choose another disk, or set checkpoints.keep=1 "
                f"or checkpoints.every=0."
            )

    def positions(self) -> dict[str, int]:
        """Sizes of the files that grow with every step, bytes; durable up to there."""
        sizes = {}
        for path in (self.metrics, self.samples, self.events):
            sizes[path.name] = path.stat().st_size if path.exists() else 0
            if path.exists():
                fsync(path)
        return sizes

    def reopen(self, positions: Mapping[str, int]) -> list[str]:
        """Continue the run that lies here: cut its files back to what they held, and remove its results.

        Args:
            positions: from `positions`.

        Returns:
            Names of the files that are shorter than they were, so that steps before are missing from them.

        Raises:
            LograError: the disk does not allow it.
        """
        short = []
        with _writing(self.path):
            for path in (self.metrics, self.samples, self.events):
                size = path.stat().st_size if path.exists() else 0
                if size < positions[path.name]:
                    short.append(path.name)
                elif size > positions[path.name]:
                    os.truncate(path, positions[path.name])
            self.results.unlink(missing_ok=True)
            for leftover in self.path.glob(TEMPORARY_PREFIX + "[0-9a-f]" * 16):  # of a process that was killed
                leftover.unlink()
        self._is_created = True
        return short

    def steps(self, positions: Mapping[str, int]) -> list[dict[str, Any]]:
        """The metrics of the steps before a checkpoint; what comes after it is not read.

        Args:
            positions: from `positions`, at the checkpoint.

        Raises:
            ConfigError: a line is damaged.
        """
        if not self.metrics.exists():
            return []
        try:
            with self.metrics.open("rb") as file:
                lines = file.read(positions[self.metrics.name]).splitlines()
        except OSError as error:
            raise ConfigError(f"resume: {str(self.metrics)!r} cannot be read: {error}") from error
        return [self._step(line, number) for number, line in enumerate(lines, start=1)]

    def _step(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            step = json.loads(line)
        except ValueError:  # neither JSON, nor perhaps text
            step = None
        if not isinstance(step, dict):
            raise ConfigError(
                f"resume: {str(self.metrics)!r}, line {number}: not the metrics of a step, the file is damaged. Restore it, "
                f"or move it away: the run then goes on without the metrics of its earlier steps"
            )
        return step

    def contents(self) -> str:
        """What of this run is on disk, in a sentence."""
        found = [part.name for part in self._parts if part.exists() and part != self._unfinished_model]
        if not self._is_created or not found:
            return f"Nothing was written to {self.path}."
        model = "the trained model is in model" if self.model.exists() else "no model was saved"
        return f"{self.path} holds {', '.join(found)}: {model}."

    def write_model(self, write: Callable[[Path], None]) -> None:
        """Let `write` fill a folder, which becomes `model` when it is complete: half a model is never left there.

        Raises:
            LograError: the disk does not take it.
        """
        shutil.rmtree(self._unfinished_model, ignore_errors=True)
        try:
            with _writing(self.model):
                write(self._unfinished_model)
                if self.model.exists():  # of a run that was resumed: it is old, and the checkpoints have all of it
                    shutil.rmtree(self.model)
                self._unfinished_model.rename(self.model)
        finally:
            shutil.rmtree(self._unfinished_model, ignore_errors=True)

    def write_config(self, config: TrainConfig) -> None:
        """Write the resolved configuration and the versions it runs with."""
        content = to_dict(config) | {"versions": versions()}
        with _writing(self.config):
            replace_text(self.config, yaml.safe_dump(content, sort_keys=False))
        self.events.touch()  # empty where no guard spoke

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one step's metrics."""
        _append(self.metrics, metrics)

    def add_sample(self, sample: Mapping[str, Any]) -> None:
        """Append one completion."""
        _append(self.samples, sample)

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Append one event of a guard."""
        _append(self.events, event)

    def write_memory(self, content: Mapping[str, Any]) -> None:
        """Write what the run held in memory."""
        with _writing(self.memory):
            self.memory.write_text(json.dumps(finite(content), indent=2) + "\n", encoding="utf-8")

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write the results of the run."""
        with _writing(self.results):
            replace_text(self.results, json.dumps(finite(results), indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of Python, the platform and the packages that decide what a run computes."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Inside, an error of the disk becomes one that says what could not be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise LograError(f"{str(path)!r} cannot be written: {error}") from error


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line and flush it: what is in the file survives an interruption."""
    with _writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite(record), ensure_ascii=False) + "\n")


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
