"""`CheckpointStore`: checkpoints as folders, one a step.

    step-000000000020/
        tensors.safetensors     all tensors
        state.json              everything else, see `logra.checkpoint.tree`
        ...                     further JSON files that the writer gives
        COMPLETE                written last: format version, step, and size and SHA-256 of every file

A checkpoint is written under a temporary name, every file is fsynced, the folder is renamed, its parent fsynced, and the
marker COMPLETE written in the same way. Killed at any moment, the writer leaves the older checkpoints as they were and at
most a folder without a marker, which readers ignore and the next writer removes. Older checkpoints are deleted only when
the new one is complete. Nothing is pickled: safetensors and JSON only.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from logra.checkpoint import tree
from logra.errors import CheckpointError, LograError

FORMAT_VERSION = 1
MARKER = "COMPLETE"
_TENSORS, _STATE = "tensors.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{12})")
TEMPORARY_PREFIX = ".tmp-"
_ASIDE = "aside-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: its folder.
        step: training step that it was written after.
    """

    path: Path
    step: int


class CheckpointStore:
    """Writes, finds, checks and deletes the checkpoints of one run.

    Args:
        folder: where they lie; made when the first is written.
        keep: newest checkpoints that are kept, >= 1.
        max_bytes: older ones are deleted too while all together are larger than this; the newest is always kept. None: no
            limit.

    Example:
        >>> store = CheckpointStore("run/checkpoints", keep=2)
        >>> store.write(20, {"weights": model.state_dict(), "seed": 0})
        >>> state = store.read(store.newest()[0])
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, max_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self._keep = keep
        self._max_bytes = max_bytes

    def write(self, step: int, state: Any, files: Mapping[str, str] | None = None) -> Checkpoint:
        """Write a checkpoint; on return it is durable, and older ones beyond the limits are gone.

        Args:
            step: its step, >= 0; a checkpoint of this step that exists is replaced.
            state: nested dicts and lists of tensors and plain values.
            files: further text files, by name.

        Raises:
            CheckpointError: the disk did not take it. Older checkpoints are as they were.
            LograError: the state holds something that is no data.
        """
        text, tensors = tree.encode(state)
        checkpoint = Checkpoint(self.folder / f"step-{step:012d}", step)
        temporary = self.folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            temporary.mkdir()
            save_file(_plain(tensors), temporary / _TENSORS)
            for name, content in {_STATE: text, **(files or {})}.items():
                (temporary / name).write_text(content, encoding="utf-8")
            records = {path.name: file_record(path) for path in sorted(temporary.iterdir())}
            for path in (*temporary.iterdir(), temporary):
                fsync(path)
            if checkpoint.path.exists():
                checkpoint.path.rename(self.folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
            temporary.rename(checkpoint.path)
            fsync(self.folder)
            marker = {"format_version": FORMAT_VERSION, "step": step, "files": records}
            replace_text(checkpoint.path / MARKER, json.dumps(marker, indent=2) + "\n")
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            older = f"; the checkpoint of step {self.steps()[-1]} is intact" if self.steps() else ""
            raise CheckpointError(f"checkpoint {str(checkpoint.path)!r} cannot be written: {error}{older}") from error
        self._prune(step)
        return checkpoint

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have a marker, ascending. Their content is not checked."""
        return sorted(found.step for found in self._folders() if (found.path / MARKER).is_file())

    def newest(self) -> tuple[Checkpoint | None, dict[str, str]]:
        """The newest checkpoint that is whole, and what is wrong with the newer ones.

        Returns:
            The checkpoint (None without one), and {folder name: what is wrong} of every newer one.
        """
        damaged = {}
        for found in sorted(self._folders(), key=lambda checkpoint: -checkpoint.step):
            try:
                self.check(found)
            except CheckpointError as error:
                damaged[found.path.name] = str(error)
            else:
                return found, damaged
        return None, damaged

    def find(self, path: str | Path) -> Checkpoint:
        """The checkpoint in a folder, checked.

        Raises:
            CheckpointError: the folder is no checkpoint of this store, or it is damaged.
        """
        path = Path(path)
        match = _NAME.fullmatch(path.name)
        if match is None or path.resolve().parent != self.folder.resolve():
            raise CheckpointError(f"{str(path)!r} is no checkpoint of {str(self.folder)!r}")
        checkpoint = Checkpoint(self.folder / path.name, int(match.group(1)))
        self.check(checkpoint)
        return checkpoint

    def check(self, checkpoint: Checkpoint) -> None:
        """Check the marker, and size and digest of every file.

        Raises:
            CheckpointError: with what is wrong.
        """
        try:
            marker = json.loads((checkpoint.path / MARKER).read_text(encoding="utf-8"))
            if marker["format_version"] != FORMAT_VERSION or marker["step"] != checkpoint.step:
                raise CheckpointError(
                    f"its marker says format {marker['format_version']!r}, step {marker['step']!r}; this library reads "
                    f"format {FORMAT_VERSION}"
                )
            for name, record in marker["files"].items():
                path = checkpoint.path / name
                # The size first: it is known at once.
                if path.stat().st_size != record["bytes"] or file_record(path) != record:
                    raise CheckpointError(f"{name} is not what was written (size or SHA-256 differs)")
        except FileNotFoundError as error:
            what = "it was not finished" if Path(error.filename).name == MARKER else f"{error.filename!r} is missing"
            raise CheckpointError(what) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"it cannot be read ({error!r})") from error

    def read(self, checkpoint: Checkpoint) -> Any:
        """The state of a checkpoint, tensors on the CPU. Files are not checked again (see `check`).

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            text = (checkpoint.path / _STATE).read_text(encoding="utf-8")
            return tree.decode(text, load_file(checkpoint.path / _TENSORS))
        except (OSError, SafetensorError, LograError) as error:
            raise CheckpointError(f"checkpoint {str(checkpoint.path)!r} cannot be read: {error}") from error

    def set_aside_after(self, step: int) -> list[str]:
        """Rename the checkpoints of later steps, so that nobody continues from them; returns their new names."""
        moved = []
        for found in self._folders():
            if found.step > step:
                target = self.folder / f"{_ASIDE}{found.path.name}-{secrets.token_hex(2)}"
                found.path.rename(target)
                moved.append(target.name)
        return moved

    def _folders(self) -> Iterator[Checkpoint]:
        for path in self.folder.glob("step-*"):
            match = _NAME.fullmatch(path.name)
            if match is not None:
                yield Checkpoint(path, int(match.group(1)))

    def _remove_leftovers(self) -> None:
        for path in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self, written: int) -> None:
        """Delete what is older than the checkpoint just written and beyond the limits, or never was finished."""
        self._remove_leftovers()
        num_kept, num_bytes = 0, 0
        for found in sorted(self._folders(), key=lambda checkpoint: -checkpoint.step):
            if found.step > written:
                continue
            size = sum(path.stat().st_size for path in found.path.iterdir())
            within = self._max_bytes is None or num_bytes + size <= self._max_bytes
            if found.step == written or ((found.path / MARKER).exists() and num_kept < self._keep and within):
                num_kept, num_bytes = num_kept + 1, num_bytes + size
            else:
                # Without its marker first: half a deletion must not look complete.
                with contextlib.suppress(OSError):
                    (found.path / MARKER).unlink(missing_ok=True)
                    shutil.rmtree(found.path)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it is, at every moment, the old one or the new one; durable on return.

    Raises:
        OSError: it could not be written; the old one is there.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_record(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, each in a storage of its own: safetensors refuses views of one storage."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.cpu().contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result
