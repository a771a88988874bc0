"""A step of many equal layers, told from two steps of few.

Every loop over layers runs through the same events for each of them, so that a step of more layers has the events of one of
fewer, and one more stretch of them in every loop. Two traced steps are laid upon each other, once from their beginning (the
same layer counted from the first) and once from their end (counted from the last); what an event of both sees alive grows
by the same with every further layer. Inside a loop, memory is a line over the layers and highest at the first or
the last of them, so the highest of all events of both alignments is the peak.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from logra.memory.categories import CATEGORIES
from logra.memory.timeline import Event, Moments, PhasePeak, Report
from logra.phases import PHASES

_FEWEST = 3
"""Layers of the smaller trace: the first and the last may differ from those between (prefetching, for one)."""
_SMALL = 1 << 16
"""Bytes below which two storages count as the same: a norm per layer grows with the layers."""


@dataclass(frozen=True)
class Depths:
    """Layers to trace, and to tell.

    Attributes:
        smaller: layers of the first trace.
        larger: of the second; one period of the model more.
        whole: of the model; smaller plus a whole number of periods.
    """

    smaller: int
    larger: int
    whole: int

    @property
    def num_periods(self) -> int:
        """Periods between the first trace and the model."""
        return (self.whole - self.smaller) // (self.larger - self.smaller)


def depths(config: Any) -> Depths | None:
    """Which layers to trace; None if the model has too few for that to save anything.

    Args:
        config: transformers configuration. `layer_types`, where there are any, repeat with the period of the model.
    """
    whole = int(config.num_hidden_layers)
    period = _period(getattr(config, "layer_types", None) or [""] * whole)
    smaller = whole % period
    while smaller < _FEWEST:
        smaller += period
    found = Depths(smaller, smaller + period, whole)
    return found if smaller + found.larger < whole else None


def _period(kinds: Sequence[str]) -> int:
    return next(
        step for step in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[step:], strict=False))
    )


def with_layers(config: Any, num_layers: int) -> Any:
    """The configuration of the same model with its first layers only."""
    settings = config.to_dict() | {"num_hidden_layers": num_layers}
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:num_layers]
    return type(config).from_dict(settings)


def continued(smaller: Moments, larger: Moments, depths: Depths) -> Report | None:
    """The report of a step of all layers.

    Args:
        smaller: events of the trace of `depths.smaller` layers.
        larger: of that of `depths.larger`.
        depths: how many layers these are, and how many the model has.

    Returns:
        None if the steps cannot be laid upon each other.
    """
    num_periods, growth = depths.num_periods, Fraction(depths.larger, depths.smaller)
    smaller, larger = _ordered(smaller), _ordered(larger)
    before, after = _alive(smaller), _alive(larger)
    pairs = _align(smaller.events, larger.events, growth)
    backwards = _align(smaller.events[::-1], larger.events[::-1], growth)
    if pairs is None or backwards is None:
        return None
    last, last_larger = len(smaller.events) - 1, len(larger.events) - 1
    pairs += [(last - i, last_larger - j) for i, j in backwards]
    own, other = (torch.tensor(side) for side in zip(*pairs, strict=True))
    alive = before[own] + num_periods * (after[other] - before[own])
    phases = {}
    for name in PHASES:
        comes = [event.num_bytes > 0 and event.phase == name for event in smaller.events]
        inside = torch.tensor(comes)[own]
        if inside.any():
            chosen = alive[inside]
            highest = chosen[chosen.sum(1).argmax()].tolist()
            phases[name] = PhasePeak(sum(highest), dict(zip(CATEGORIES, highest, strict=True)))
    resident = {
        name: smaller.resident[name] + num_periods * (larger.resident[name] - smaller.resident[name])
        for name in CATEGORIES
    }
    return Report.of(phases, resident)


def _ordered(moments: Moments) -> Moments:
    """Storages that go one after the other sorted: a cache that is emptied lets them go in any order."""
    runs = itertools.groupby(moments.events, key=lambda event: (event.num_bytes < 0, event.phase))
    events = [event for (goes, _), run in runs for event in (sorted(run) if goes else run)]
    return replace(moments, events=events)


def _alive(moments: Moments) -> Tensor:
    """Live bytes after every event, by category, int64 [events, categories]."""
    column = {name: index for index, name in enumerate(CATEGORIES)}
    changes = torch.zeros(len(moments.events), len(CATEGORIES), dtype=torch.int64)
    columns = torch.tensor([column[event.category] for event in moments.events])
    sizes = torch.tensor([event.num_bytes for event in moments.events])
    changes[torch.arange(len(moments.events)), columns] = sizes
    return changes.cumsum(0) + torch.tensor([moments.start.get(name, 0) for name in CATEGORIES])


def _align(shorter: Sequence[Event], longer: Sequence[Event], growth: Fraction) -> list[tuple[int, int]] | None:
    """The event of the longer step that each event of the shorter one is; None if they are not the same steps."""
    pairs, index, shift, most = [], 0, 0, len(longer) - len(shorter)
    while index < len(shorter):
        num_equal = _common(shorter, longer, growth, index, index + shift)
        if num_equal == 0:
            # A stretch that only the longer step has, or one storage whose size follows another rule (a share of all
            # weights): go on where the two agree for longest.
            lengths = [_common(shorter, longer, growth, index, index + later) for later in range(shift + 1, most + 1)]
            longest = max(lengths, default=0)
            if index + shift < len(longer) and _is_alike(shorter[index], longer[index + shift]):
                after = _common(shorter, longer, growth, index + 1, index + 1 + shift)
                num_equal = after + 1 if after >= longest else 0
            if num_equal == 0:
                if longest == 0:
                    return None
                shift += 1 + lengths.index(longest)
                continue
        pairs += [(own, own + shift) for own in range(index, index + num_equal)]
        index += num_equal
    return pairs


def _common(shorter: Sequence[Event], longer: Sequence[Event], growth: Fraction, own: int, other: int) -> int:
    """How many events agree from these positions on."""
    start = own
    while own < len(shorter) and other < len(longer) and _agree(shorter[own], longer[other], growth):
        own, other = own + 1, other + 1
    return own - start


def _is_alike(event: Event, other: Event) -> bool:
    """Whether two events differ in size at most."""
    return (event.phase, event.category, event.num_bytes < 0) == (other.phase, other.category, other.num_bytes < 0)


def _agree(event: Event, other: Event, growth: Fraction) -> bool:
    """Whether they may be one event of both steps: the same size, or one that grows with the layers (a batch of all)."""
    size, other_size = abs(event.num_bytes), abs(other.num_bytes)
    is_size = size == other_size or max(size, other_size) < _SMALL or size < other_size <= growth**2 * size
    return is_size and _is_alike(event, other)
