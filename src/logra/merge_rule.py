"""The merge rule of a run: what becomes of fl(fl(W · decay) - dW), the fp32 result of a merge, before it is the weight.

It belongs to the run (its `weight_storage`), stands in every packet, and is followed by whoever keeps these weights, in
whatever planes. With the bits of an fp32 number read as an integer, and its low half as what bf16 leaves out:

- `fp32`: nothing.
- `split32`: ties, numbers exactly between two bf16 numbers (low half 0x8000), move by one unit of the last place towards
  the even one (`nudge_ties`): a bf16 plane could not tell which way they were rounded.
- `split24`: rounded to the grid of numbers whose low byte is zero and that are no ties, at random and without bias
  (`round24_`). Two neighbours on the grid are 2^8 apart in their bits, or 2^9 around a tie:

      ... 0x7E00   0x7F00  (0x8000)  0x8100   0x8200 ...            low halves; the tie is left out

Rounding is element by element with counter-based noise of (seed of the run, version that the update produces, name of the
weight, index of the element in the whole weight): every process, shard, device and replica draws the same bits, and
nothing is stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from logra.errors import ConfigError
from logra.hashing import Range, derive_key, element_words

WEIGHT_STORAGES = ("fp32", "split32", "split24")
TIE = 0x8000
"""Low half of a number exactly between two bf16 numbers."""


@dataclass(frozen=True)
class MergeRule:
    """What one update does to one weight after the subtraction.

    Attributes:
        weight_storage: "fp32", "split32" or "split24", of the run.
        key: stream of the rounding noise of "split24"; of no effect otherwise.

    Raises:
        ConfigError: another weight storage.
    """

    weight_storage: str
    key: int = 0

    def __post_init__(self) -> None:
        if self.weight_storage not in WEIGHT_STORAGES:
            raise ConfigError(
                f"MergeRule.weight_storage is {self.weight_storage!r}; allowed are {', '.join(WEIGHT_STORAGES)}"
            )

    @staticmethod
    def of(weight_storage: str, *, seed: int, version: int, name: str) -> "MergeRule":
        """The rule of a run for a weight.

        Args:
            weight_storage: of the run.
            seed: of the run.
            version: that the update produces.
            name: fully qualified name of the weight, as in the update.
        """
        key = derive_key("split24", seed, version, name) if weight_storage == "split24" else 0
        return MergeRule(weight_storage, key)

    def settle_(self, value: Tensor, shape: tuple[int, int], rows: Range, columns: Range) -> None:
        """Apply it, in place.

        Args:
            value: fp32 [rows, columns], any strides, finite.
            shape: (out, in) of the whole weight.
            rows: half-open range of output features that `value` holds.
            columns: half-open range of input features that `value` holds.
        """
        if self.weight_storage == "split32":
            nudge_(value)
        elif self.weight_storage == "split24":
            round24_(value, element_words(self.key, *shape, rows=rows, columns=columns, device=value.device))


@torch.no_grad()
def nudge_ties(value: Tensor) -> Tensor:
    """`value` with every tie between two bf16 numbers moved by one ulp towards the one with the even mantissa.

    Args:
        value: fp32, any shape, finite.

    Returns:
        fp32 of the same shape; differs from `value` only where its low 16 bits are 0x8000. Applying it twice changes
        nothing more, and rounding to bf16 gives the same result before and after.
    """
    nudged = value.clone()
    nudge_(nudged)
    return nudged


@torch.no_grad()
def nudge_(value: Tensor) -> None:
    """`nudge_ties` in place."""
    bits = value.view(torch.int32)
    rounded = value.to(torch.bfloat16).to(torch.float32).view(torch.int32)
    torch.add(rounded, nudged_rest_(bits - rounded), out=bits)


def nudged_rest_(rest: Tensor) -> Tensor:
    """What the bits of a value exceed those of its bf16 rounding by, int32, in place: a tie, ±2^15, is one ulp less far."""
    return rest.clamp_(-TIE + 1, TIE - 1)


@torch.no_grad()
def round24_(value: Tensor, words: Tensor) -> None:
    """Round to the grid of split24, in place, at random and without bias.

    With w the word of an element and b the bits of its value, b' = (b + (w mod 2^8)) with the low byte set to zero; and
    where b' is a tie, it moves by 2^8, away from zero if bit 8 of w is set, else towards zero. Neighbours on the grid lie
    in one binade, so the expectation over w is `value` exactly, also around ties: with d the distance in bits from the
    lower neighbour, the upper one is reached with probability d / 2^8, or d / 2^9 around a tie (half of those that arrive
    at it). A value on the grid stays.

    Args:
        value: fp32 [rows, columns], any strides; magnitudes below `LIMIT24`.
        words: int32 [rows, columns], 32 random bits an element; used up.
    """
    bits = value.view(torch.int32)
    bits.add_(words & 0xFF).bitwise_and_(-0x100)
    away = words.bitwise_and_(0x100).mul_(2).sub_(0x100)
    bits.add_(away.mul_((bits & 0xFFFF) == TIE))


LIMIT24 = 2.0**128 - 2.0**119 - 2.0**112 + 2.0**104
"""Magnitudes of split24 are below this, one ulp above 0x7F7F7F00, the last number of the grid that is finite in bf16."""
