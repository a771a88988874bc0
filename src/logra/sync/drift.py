"""How far weights that are kept in bf16 alone may be from the trainer's.

Every merge into bf16 rounds. With e_t the Frobenius norm of what update t lost, the distance d of a weight from the
trainer's obeys

    d_t <= d_{t-1} + e_t + 2^-21 ‖W‖,        in runs with split24 weights  d_t <= d_{t-1} + e_t + (2^-14 + 2^-21) ‖W‖

where the last term covers the roundings of fp32 and the nudges on both sides, and the trainer's rounding to 24 bits (at
most 2^9 units of the last place), which is of no use to weights of 16 bits. The bound needs no contact with the trainer; an
anchor gives the distance itself, and sets it back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logra.merge_rule import MergeRule, nudge_ties
from logra.sync.fit import part_of
from logra.sync.layout import Layout, Piece, Placement
from logra.update import LowRankUpdate, subtract_

_SLACK = {"fp32": 2.0**-21, "split32": 2.0**-21, "split24": 2.0**-14 + 2.0**-21}
_BF16_ROUNDING = 2.0**-7
"""‖W - bf16(W)‖ <= 2^-8 ‖W‖ for normal numbers; twice that, since ‖W‖ is taken of the rounded weight."""


@dataclass(frozen=True)
class Drift:
    """Distances are relative: ‖W - W_trainer‖_F / ‖W‖_F over all weights here that updates or anchors have changed.

    Attributes:
        version: of the weights.
        bound: upper bound of the distance; 0.0 for exact storage, NaN where the distance at the start is not known.
        digest_matches: the last digest in an update agreed with the weights; None where there was none.
        digest_version: version of that digest.
        measured: the distance just before the last anchor was taken over; None without one.
        measured_version: version of that anchor.
    """

    version: int
    bound: float = 0.0
    digest_matches: bool | None = None
    digest_version: int | None = None
    measured: float | None = None
    measured_version: int | None = None


class DriftLedger:
    """Bounds of the distance of every weight of a bf16 replica.

    Args:
        layout: its weights. Nothing is known of them until `start`, or until an anchor replaces them.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._bounds = dict.fromkeys(layout, math.nan)
        self._changed: set[str] = set()
        self._comparison: tuple[int, bool] | None = None
        self._measurement: tuple[int, float] | None = None

    def start(self, *, exact: bool) -> None:
        """The weights are those of the base model, exactly or rounded to bf16."""
        for name, placement in self._layout.items():
            self._bounds[name] = 0.0 if exact else _BF16_ROUNDING * _norm(placement)

    @torch.no_grad()
    def merge(self, name: str, piece: Piece, update: LowRankUpdate, rule: MergeRule) -> None:
        """Merge an update into a piece, and add what the rounding lost to the bound of its weight."""
        lost = square = 0.0
        for (start, stop), change in update.to(piece.tensor.device).changes(piece.rows, piece.columns):
            value = piece.value(start, stop)
            subtract_(value, change, update.decay)
            value = nudge_ties(value) if rule.weight_storage == "split32" else value
            rounded = value.to(torch.bfloat16)
            lost += float((value - rounded.to(torch.float32)).square().sum(dtype=torch.float64))
            square += float(value.square().sum(dtype=torch.float64))
            piece.tensor[start:stop] = rounded
        piece.lo = None  # of a weight that was replaced, by a rollback
        self._changed.add(name)
        self._bounds[name] += math.sqrt(lost) + _SLACK[rule.weight_storage] * math.sqrt(square)

    def replaced(self, name: str, value: Tensor, placement: Placement) -> None:
        """A weight has just been replaced by the trainer's, rounded to what its pieces hold."""
        self._changed.add(name)
        self._bounds[name] = math.sqrt(_square_distance(value, placement))

    def moved(self, name: str) -> None:
        """A tensor has moved by the trainer's delta, with a low plane: it is as many fp32 numbers off as it was.

        That were at most 2^15, the half distance of bf16 numbers, when its base was rounded.
        """
        self._changed.add(name)
        if self._bounds[name] > 0:
            self._bounds[name] = max(self._bounds[name], _BF16_ROUNDING * _norm(self._layout[name]))

    def measure(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Measure the distance from an anchor of the version of the weights, which is about to be taken over."""
        square = sum(_square_distance(value, self._layout[name]) for name, value in weights.items())
        norm = math.hypot(*(_norm(self._layout[name]) for name in weights))
        self._measurement = (version, math.sqrt(square) / norm if norm > 0 else 0.0)

    def compared(self, version: int, matches: bool) -> None:
        """The digest of an update was compared with the weights."""
        self._comparison = (version, matches)

    def report(self, version: int) -> Drift:
        """The drift at this version."""
        norm = math.hypot(*(_norm(self._layout[name]) for name in self._changed))
        bound = math.hypot(*(self._bounds[name] for name in self._changed))
        digest_version, matches = self._comparison or (None, None)
        measured_version, measured = self._measurement or (None, None)
        return Drift(version, bound / norm if norm > 0 else 0.0, matches, digest_version, measured, measured_version)


def _norm(placement: Placement) -> float:
    squares = [
        float(block.square().sum(dtype=torch.float64)) for piece in placement.pieces for _, block in piece.blocks()
    ]
    return math.sqrt(sum(squares))


def _square_distance(value: Tensor, placement: Placement) -> float:
    total = 0.0
    for piece in placement.pieces:
        part = part_of(value, placement, piece)
        for (start, stop), block in piece.blocks():
            total += float((block - part[start:stop].to(block.device, torch.float32)).square().sum(dtype=torch.float64))
    return total
