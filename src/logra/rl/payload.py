"""What a rollout leaves behind, kept as small as its values allow, and memory that is given back to the system.

Between generation and the last gradient that reads them, TRL holds tokens and masks as int64. Tokens fit in int32 and
masks in one bit of meaning, so they are held as int32 and bool, 5 of 16 bytes a token, and are widened again one
micro-batch at a time. Log-probabilities and advantages stay what they are: rounding them would change the loss.
"""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CompactBatch:
    """One micro-batch of TRL, held small.

    Attributes:
        values: as TRL names them; integers narrowed where no value is lost.
        narrowed: names of the tensors that were int64.
    """

    values: Mapping[str, Any]
    narrowed: frozenset[str]

    @staticmethod
    def of(batch: Mapping[str, Any]) -> "CompactBatch":
        """The batch with every int64 tensor as bool or int32 if its values are in 0..1 or in the range of int32."""
        narrowed = {
            name: _narrowed(value)
            for name, value in batch.items()
            if isinstance(value, Tensor) and value.dtype == torch.int64 and value.numel() > 1
        }
        return CompactBatch({**batch, **narrowed}, frozenset(narrowed))

    def whole(self) -> dict[str, Any]:
        """What TRL gave, with its dtypes."""
        return {name: value.long() if name in self.narrowed else value for name, value in self.values.items()}


def _narrowed(value: Tensor) -> Tensor:
    low, high = (int(bound) for bound in torch.aminmax(value))
    if low >= 0 and high <= 1:
        return value.to(torch.bool)
    fits = low >= -(2**31) and high < 2**31
    return value.to(torch.int32) if fits else value


def return_free_memory() -> None:
    """Give memory that the C library holds free back to the system (glibc's malloc_trim); nothing where there is none.

    CPU tensors below some megabytes live on the heap, which glibc keeps after they are freed: a run would otherwise stay
    as large as its largest moment.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None
