"""Where a run continues: which checkpoint, and whether it is the same run.

A run is the same if its settings are, except those that only decide how long it is, what it keeps and what it shows. The
rows of the task are compared by digest, versions of the packages by name.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from logra import distributed
from logra.checkpoint import Checkpoint, CheckpointStore
from logra.errors import CheckpointError, ConfigError
from logra.rl.checkpoints import RUN
from logra.rl.config import PATHS, TrainConfig, to_dict
from logra.rl.run_folder import RunFolder, versions
from logra.rl.tasks import Task

MAY_DIFFER = (
    "output_dir", "overwrite", "resume", "checkpoints", "run.num_steps", "run.num_threads", "run.num_logged_samples",
    "run.report_to", "run.anchor_every", "rollout.server_url", "rollout.num_workers", "profile", "versions",
)  # fmt: skip
"""Settings that may change when a run is resumed; a group stands for all its settings."""


@dataclass(frozen=True)
class Origin:
    """What a run starts from.

    Attributes:
        continues: a run lies in the folder, and this one is its continuation.
        checkpoint: to continue from; None begins with the first step.
        state: what the checkpoint holds.
        notes: what the user should know.
    """

    continues: bool = False
    checkpoint: Checkpoint | None = None
    state: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> dict[str, Any]:
        """What the run, not the trainer, put into the state."""
        return {} if self.state is None else self.state[RUN]


def find_origin(config: TrainConfig, folder: RunFolder, store: CheckpointStore, task: Task) -> Origin:
    """What `config.resume` asks for: process 0 chooses, and every process reads the state.

    Raises:
        ConfigError: other settings or other rows than those of the run, or a path that is no checkpoint of it.
        CheckpointError: the checkpoint that was named is damaged.
    """
    origin = distributed.from_leader(lambda: _find(config, folder, store))
    if origin.checkpoint is None:
        return origin
    state = store.read(origin.checkpoint)
    if state[RUN]["rows_sha256"] != rows_digest(task):
        raise ConfigError(
            f"task={config.task!r}: its rows are not those that the run in {str(folder.path)!r} trained on"
        )
    notes = list(origin.notes)
    num_processes, before = distributed.num_processes(), state[RUN].get("num_processes", 1)
    if num_processes != before:
        notes.append(
            f"Warning: the checkpoint is of {before} processes, and {num_processes} go on: the steps to come have other "
            f"samples than those of an uninterrupted run"
        )
    notes.append(
        f"Resuming from {origin.checkpoint.path}: {origin.checkpoint.step} of {config.run.num_steps} steps are done"
    )
    return dataclasses.replace(origin, state=state, notes=notes)


def _find(config: TrainConfig, folder: RunFolder, store: CheckpointStore) -> Origin:
    """What `config.resume` asks for, without the state."""
    if config.resume is None:
        return Origin()
    if not folder.holds_run:
        if config.resume != "auto":
            raise ConfigError(f"resume={config.resume!r}: output_dir={config.output_dir!r} holds no run to continue")
        return Origin()
    notes = _require_same_run(config, folder)
    checkpoint = _choose(config.resume, store, notes)
    if checkpoint is None:
        return Origin(continues=True, notes=[*notes, f"No complete checkpoint in {store.folder}: starting at step 0"])
    return Origin(continues=True, checkpoint=checkpoint, notes=notes)


def rows_digest(task: Task) -> str:
    """Digest of the rows to train on, in their order."""
    digest = hashlib.sha256()
    for row in task.train:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def set_aside_later(config: TrainConfig, store: CheckpointStore, origin: Origin) -> list[str]:
    """Rename the checkpoints after one that was named, on process 0: the run is about to make others.

    Args:
        config: the run.
        store: its checkpoints.
        origin: from `find_origin`; everything about it has been checked.

    Returns:
        What the user should know.
    """
    if origin.checkpoint is None or config.resume == "auto" or distributed.rank() != 0:
        return []
    moved = store.set_aside_after(origin.checkpoint.step)
    if not moved:
        return []
    return [f"Later checkpoints were renamed, delete them if you like: {', '.join(moved)} in {store.folder}"]


def require_log(trainer: Any, folder: RunFolder, version: int) -> None:
    """Refuse a log of updates that ends before the checkpoint: what follows would leave a gap in it.

    Args:
        trainer: of the run; one without a publisher has no log.
        folder: of the run.
        version: of the policy at the checkpoint.

    Raises:
        CheckpointError: the log ends before it.
    """
    publisher = getattr(trainer, "publisher", None)
    if publisher is not None and publisher.log.latest() < version:
        raise CheckpointError(
            f"resume: the checkpoint is at policy version {version}, but the log {str(folder.updates)!r} ends at "
            f"{publisher.log.latest()}. Restore the log, or resume from an older checkpoint"
        )


def _choose(resume: str, store: CheckpointStore, notes: list[str]) -> Checkpoint | None:
    if resume == "auto":
        checkpoint, damaged = store.newest()
        notes += [f"Warning: checkpoint {name} is ignored: {what}" for name, what in damaged.items()]
        return checkpoint
    try:
        return store.find(resume)
    except CheckpointError as error:
        raise ConfigError(f"resume={resume!r}: {error}. --resume auto takes the newest complete checkpoint") from error


def _require_same_run(config: TrainConfig, folder: RunFolder) -> list[str]:
    """Refuse other settings; what differs in the versions of packages is returned as notes."""
    found = _saved_settings(folder)
    saved = dict(_flat(found))
    saved |= {name: os.path.expanduser(saved[name]) for name in PATHS if isinstance(saved.get(name), str)}
    present = dict(_flat(yaml.safe_load(yaml.safe_dump(to_dict(config)))))
    differing = [
        f"{name}={present[name]!r} (in the run {saved[name]!r})"
        for name in present.keys() & saved.keys()
        if present[name] != saved[name] and not _may_differ(name)
    ]
    if differing:
        raise ConfigError(
            f"resume={config.resume!r}: the run in {str(folder.path)!r} has other settings: {', '.join(sorted(differing))}. "
            f"Give the same ones (--config {folder.config} does), or choose another output_dir"
        )
    old = found.get("versions", {})
    changed = [f"{name} {old[name]} -> {new}" for name, new in versions().items() if name in old and old[name] != new]
    note = (
        "Warning: versions have changed, so the steps to come may differ in their last bits from an uninterrupted run: "
    )
    return [note + ", ".join(changed)] if changed else []


def _saved_settings(folder: RunFolder) -> dict[str, Any]:
    """The content of config.yaml.

    Raises:
        ConfigError: it is damaged.
    """
    remedy = "Restore it, replace the run with --overwrite in place of --resume, or choose another output_dir"
    try:
        found = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # bytes that are no text are a ValueError
        raise ConfigError(f"resume: {str(folder.config)!r} cannot be read: {error}. {remedy}") from error
    if not _has_text_keys(found) or not isinstance(found.get("versions", {}), Mapping):
        raise ConfigError(
            f"resume: {str(folder.config)!r} does not hold the settings of a run: it is damaged. {remedy}"
        )
    return found


def _has_text_keys(tree: Any) -> bool:
    """Whether this is a mapping with texts as keys, and every mapping in it too."""
    return isinstance(tree, Mapping) and all(
        isinstance(name, str) and (not isinstance(value, Mapping) or _has_text_keys(value))
        for name, value in tree.items()
    )


def _may_differ(name: str) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in MAY_DIFFER)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested groups, by dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
