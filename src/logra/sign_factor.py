"""The factor of random signs that a seed stands for: never stored, never sent, regenerated wherever it is needed."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from logra.errors import LograError
from logra.hashing import Range, derive_key, signs
from logra.phases import purpose


@dataclass(frozen=True)
class SignFactor:
    """A factor of random signs that is regenerated wherever it is needed instead of stored.

    Attributes:
        seed: seed of the run.
        update_index: index of the update for which the projection was drawn.
        name: name of the projection; modules with one name, side and width share it.
        side: "in": the factor is R [r, in]; "out": the factor is L [out, r].
    """

    seed: int
    update_index: int
    name: str
    side: Literal["in", "out"]

    def __post_init__(self) -> None:
        if self.side not in ("in", "out"):
            raise LograError(f"SignFactor.side is {self.side!r}; allowed are 'in' and 'out'")

    def key(self, width: int) -> int:
        """The key of the sign stream for a weight with `width` features on this side."""
        return derive_key("projection", self.seed, self.update_index, self.name, self.side, width)

    def matrix(
        self,
        rank: int,
        width: int,
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The factor, or a slice of it.

        Args:
            rank: r. Fewer rows of signs are a prefix of more rows.
            width: number of features of the weight on this side (in or out).
            rows: half-open range of rows of the result to generate; None for all.
            columns: half-open range of columns of the result to generate; None for all.
            device: where to generate; None for the CPU.

        Returns:
            fp32 with entries ±1, the requested part of [r, in] for side "in" and of [out, r] for side "out".
        """
        key = self.key(width)
        with purpose("projections"):
            if self.side == "in":
                return signs(key, rank, width, rows=rows, columns=columns, device=device)
            return signs(key, rank, width, rows=columns, columns=rows, device=device).T
