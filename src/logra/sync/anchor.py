"""Anchors: full weights at one version, as a safetensors file.

The file holds one tensor for every weight that the run may change: targets in fp32, [out, in]; others in their own dtype,
all in canonical orientation. Its metadata entry "logra" is a JSON text with `run_id`, `version` and `digest`, the digest
(see `logra.sync.digest`) of the tensors in the file: it catches damage, which safetensors alone does not.
"""

import errno
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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
    metadata = {"run_id": run_id, "version": version, "digest": digest_of(weights)}
    # Contiguous copies where needed: safetensors refuses views.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}

    def save(temporary: Path) -> None:
        try:
            save_file(plain, temporary, {_METADATA_KEY: json.dumps(metadata)})
        except SafetensorError as error:
            # The library reports a full disk in the text only.
            number = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
            raise OSError(number, f"safetensors cannot write it: {error}") from error

    durable.write_file(path, save, directory)


def read(path: Path, *, run_id: str, version: int) -> dict[str, Tensor]:
    """The weights of an anchor, on the CPU.

    Raises:
        SyncError: it is missing, damaged, or of another run or version.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get(_METADATA_KEY, "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        digest = digest_of(weights)
    except (SafetensorError, OSError, ValueError, LograError) as error:
        raise SyncError(f"anchor {path}: cannot be read ({error})") from error
    if metadata != {"run_id": run_id, "version": version, "digest": digest}:
        raise SyncError(
            f"anchor {path}: damaged, or not that of run {run_id!r} at version {version} (it says {metadata})"
        )
    return weights
