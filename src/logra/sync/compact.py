"""Which tensors of an update travel as deltas: those that were published before, where that is smaller.

The first time that a publisher sees a tensor it sends the value, so that every reader of the log holds the base of the
deltas that follow. It keeps a copy of each tensor, and of the update before the last for a publication that is repeated.
"""

from dataclasses import replace

import torch
import zstandard
from torch import Tensor

from logra.tensor_delta import DELTA_DTYPES, TensorDelta
from logra.update import PolicyUpdate


class CompactTensors:
    """Turns tensors of consecutive updates into deltas. The copies are on the CPU."""

    def __init__(self) -> None:
        self._version = -1
        self._values: dict[str, Tensor] = {}
        """Of the newest version seen."""
        self._bases: dict[str, Tensor] = {}
        """Of the version before it."""

    def publishable(self, update: PolicyUpdate) -> PolicyUpdate:
        """The update with deltas in place of tensors whose base is known, where they are smaller.

        The same for the same update, also if it was asked for before: a repeated publication must have the same content.
        """
        if update.version != self._version:
            self._bases = self._values if update.base_version == self._version else {}
        tensors, deltas = {}, dict(update.deltas)
        # A low-rank change moves a tensor away from the value that was published last.
        values = {name: value for name, value in self._bases.items() if name not in update.weights}
        for name, tensor in update.tensors.items():
            value = tensor.detach().cpu().clone()
            delta = _delta(self._bases.get(name), value)
            if delta is None:
                tensors[name] = tensor
            else:
                deltas[name] = delta
            values[name] = value
        self._version, self._values = update.version, values
        return replace(update, tensors=tensors, deltas=deltas)


def _delta(base: Tensor | None, value: Tensor) -> TensorDelta | None:
    """The delta, if it can be made and is smaller than the value once both are compressed."""
    if (
        base is None
        or value.dtype not in DELTA_DTYPES.values()
        or (base.dtype, base.shape) != (value.dtype, value.shape)
    ):
        return None
    delta = TensorDelta.between(base, value)
    return delta if _compressed_bytes(delta.planes()) < _compressed_bytes(value) else None


def _compressed_bytes(tensor: Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return len(zstandard.ZstdCompressor(level=1).compress(data))
