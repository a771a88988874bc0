"""Anchors: full weights at one version, as a safetensors file.

The file holds one tensor for every weight that the run may change: targets in fp32, [out, in]; others in their own dtype,
all in canonical orientation. Its metadata entry "logra" is a JSON text with `run_id`, `version` and `digest`, the digest
(see `logra.sync.digest`) of the tensors in the file: it catches damage, which safetensors alone does not.
"""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from logra.errors import LograError, SyncError
from logra.sync import durable
from logra.sync.layout import Placement, weights_digest, whole_piece

_METADATA_KEY = "logra"


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """The digest of a set of whole canonical weights."""
    placements = {
        name: Placement(tuple(tensor.shape), (whole_piece(tensor.detach()),)) for name, tensor in weights.items()
    }
    digest = weights_digest(placements)
    assert digest is not None
    return digest


def write(path: Path, directory: int, weights: Mapping[str, Tensor], *, run_id: str, version: int) -> None:
    """Write an anchor durably.

    Args:
        path: where; must not exist.
        directory: descriptor of its locked folder.
        weights: {name: canonical weight}, on any device.
        run_id: of the log.
        version: of the weights.

    Raises:
        OSError: the file system failed; the anchor is absent.
        LograError: a tensor that is no weight.
    """
    plain, metadata = _content(weights, run_id, version)

    def save_to(temporary: Path) -> None:
        try:
            save_file(plain, temporary, metadata)
        except SafetensorError as error:
            # The library reports a full disk in the text only.
            number = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
            raise OSError(number, f"safetensors cannot write it: {error}") from error

    durable.write_file(path, save_to, directory)


def to_bytes(weights: Mapping[str, Tensor], *, run_id: str, version: int) -> bytes:
    """The content of an anchor's file; like `write`."""
    return save(*_content(weights, run_id, version))


def read(path: Path, *, run_id: str, version: int) -> dict[str, Tensor]:
    """The weights of an anchor, on the CPU.

    Raises:
        SyncError: it is missing, damaged, or of another run or version.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get(_METADATA_KEY, "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise SyncError(f"anchor {path}: cannot be read ({error})") from error
    return _checked(weights, metadata, str(path), run_id, version)


def from_bytes(data: bytes, where: str, *, run_id: str, version: int) -> dict[str, Tensor]:
    """The weights of the content of an anchor's file; `where` names it in errors. Raises like `read`."""
    try:
        weights = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header.get("__metadata__", {}).get(_METADATA_KEY, "null"))
    except (SafetensorError, ValueError) as error:
        raise SyncError(f"anchor {where}: cannot be read ({error})") from error
    return _checked(weights, metadata, where, run_id, version)


def _content(weights: Mapping[str, Tensor], run_id: str, version: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    metadata = {"run_id": run_id, "version": version, "digest": digest_of(weights)}
    # Contiguous copies where needed: safetensors refuses views.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    return plain, {_METADATA_KEY: json.dumps(metadata)}


def _checked(weights: dict[str, Tensor], metadata: Any, where: str, run_id: str, version: int) -> dict[str, Tensor]:
    try:
        digest = digest_of(weights)
    except LograError as error:
        raise SyncError(f"anchor {where}: cannot be read ({error})") from error
    if metadata != {"run_id": run_id, "version": version, "digest": digest}:
        raise SyncError(
            f"anchor {where}: damaged, or not that of run {run_id!r} at version {version} (it says {metadata})"
        )
    return weights
