"""Bytes of the other ways to send one step: all weights, the elements that changed, and dense low-rank factors.

Each is given what favours it: values and the gaps between their indices are split into byte planes before zstd, which
nobody has to do.
"""

from collections.abc import Iterable, Mapping

import torch
import zstandard
from torch import Tensor

from logra.update import LowRankUpdate

_LEVEL = 3


def full_bytes(num_weights: int) -> int:
    """All weights in bf16, which hardly compresses."""
    return 2 * num_weights


def low_rank_bytes(updates: Iterable[LowRankUpdate]) -> int:
    """Factors of the same shapes and ranks in bf16, as a LoRA adapter has them."""
    return sum(2 * update.rank * sum(update.shape) for update in updates)


def sparse_delta(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[int, int]:
    """The elements that differ after rounding to bf16, as indices and new values, compressed.

    Args:
        before: {name: weight}, fp32, any shape.
        after: the same weights a step later.

    Returns:
        Bytes, and the number of elements that differ.
    """
    num_bytes = num_changed = 0
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    for name, old in before.items():
        new = after[name].to(torch.bfloat16).flatten().view(torch.int16)
        index = (new != old.to(torch.bfloat16).flatten().view(torch.int16)).nonzero().flatten()
        gaps = torch.diff(index, prepend=torch.zeros(1, dtype=index.dtype)).to(torch.int32)
        for values in (gaps, new[index]):
            num_bytes += len(compressor.compress(byte_planes(values)))
        num_changed += len(index)
    return num_bytes, num_changed


def byte_planes(values: Tensor) -> bytes:
    """The first bytes of all elements, then the second ones, and so on."""
    return values.contiguous().view(torch.uint8).view(-1, values.element_size()).T.contiguous().numpy().tobytes()
