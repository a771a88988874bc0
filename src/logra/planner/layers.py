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

import numpy as np
import torch
from torch import Tensor, nn

from logra.memory.categories import CATEGORIES
from logra.memory.timeline import Event, Moments, PhasePeak, Report
from logra.phases import PHASES
from logra.planner.models import meta_model

_FEWEST = 3
"""Layers of the smaller trace: the first and the last may differ from those between (prefetching, for one)."""
_SMALL = 5e-6
"""Share of the highest moment below which a storage is not aligned (it still counts)."""
Placed = tuple[int, Event]
"""An event and its position in the step."""
_EQUAL, _NEAR, _DIFFERENT = 3, 2, -6
"""Agreement of two events: of one size, of sizes as layers grow, of another kind. 0 for sizes apart."""
_STRETCH = 8
"""What a stretch that only the longer step has costs."""
_ALIKE = 0.98
"""Share of the events of a phase that must find their like."""


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
        config: transformers configuration. Kinds and parameters of layers repeat with the period of the model.
    """
    kinds = _kinds(config)
    whole = len(kinds)
    period = next(step for step in range(1, whole + 1) if kinds[step:] == kinds[: whole - step])
    smaller = whole % period
    while smaller < _FEWEST:
        smaller += period
    found = Depths(smaller, smaller + period, whole)
    return found if smaller + found.larger < whole else None


def _kinds(config: Any) -> list[Any]:
    """What tells layers apart: the kind that the configuration gives them, and their parameters."""
    whole = int(config.num_hidden_layers)
    layers = decoder_layers(meta_model(config))
    names = getattr(config, "layer_types", None) or [""] * whole
    shapes = [[(name, tuple(value.shape)) for name, value in layer.named_parameters()] for layer in layers]
    if len(shapes) != whole:
        return list(range(whole))  # layers that are no list of modules: no two are known to be alike
    return list(zip(names, shapes, strict=True))


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The first list of modules of a model; empty if it has none."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0)
    return list(next(lists, ()))


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
    least = _SMALL * float(before.sum(1).max()) if len(before) else 0.0
    own_large, other_large = _large(smaller.events, least), _large(larger.events, least)
    pairs = _align(own_large, other_large, growth)
    backwards = _align(own_large[::-1], other_large[::-1], growth)
    if not pairs or not backwards:
        return None
    pairs += backwards
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


def _large(events: Sequence[Event], least: float) -> list[Placed]:
    return [(index, event) for index, event in enumerate(events) if abs(event.num_bytes) >= least]


def _align(shorter: Sequence[Placed], longer: Sequence[Placed], growth: Fraction) -> list[tuple[int, int]] | None:
    """The event of the longer step that each event of the shorter one is; None if they are not the same steps.

    Of all ways to put stretches into the shorter step, the one with the most agreement, and the latest stretches.
    """
    pairs: list[tuple[int, int]] = []
    phases, other_phases = _by_phase(shorter), _by_phase(longer)
    if [name for name, _ in phases] != [name for name, _ in other_phases]:
        return None
    for (_, own), (_, other) in zip(phases, other_phases, strict=True):
        found = _align_phase([event for _, event in own], [event for _, event in other], growth)
        if found is None:
            return None
        pairs += [(own[i][0], other[j][0]) for i, j in found]
    return pairs


def _by_phase(events: Sequence[Placed]) -> list[tuple[str, list[Placed]]]:
    return [(name, list(group)) for name, group in itertools.groupby(events, key=lambda placed: placed[1].phase)]


def _align_phase(shorter: Sequence[Event], longer: Sequence[Event], growth: Fraction) -> list[tuple[int, int]] | None:
    most = len(longer) - len(shorter)
    if most < 0:
        return None
    kinds = {kind: index for index, kind in enumerate({_kind(event) for event in (*shorter, *longer)})}
    sizes = np.array([abs(event.num_bytes) for event in longer])
    kind = np.array([kinds[_kind(event)] for event in longer])
    best, came_from = np.full(most + 1, -_STRETCH * len(shorter)), []
    best[0] = 0
    shifts = np.arange(most + 1)
    for index, event in enumerate(shorter):
        # The best way to arrive at each shift: a stretch that begins here, or none. On equal terms it begins here.
        key = best * (most + 1) + shifts
        arrive = np.maximum.accumulate(key[:-1]) if most else key[:0]
        before, source = arrive // (most + 1) - _STRETCH, arrive % (most + 1)
        begins = before >= best[1:]
        came_from.append(np.concatenate(([0], np.where(begins, source, shifts[1:]))).astype(np.int32))
        best[1:] = np.where(begins, before, best[1:])
        size, other = abs(event.num_bytes), sizes[index : index + most + 1]
        is_near = (other >= size) & (other <= float(growth) ** 2 * size)
        agreement = np.where(other == size, _EQUAL, np.where(is_near, _NEAR, 0))
        best += np.where(kind[index : index + most + 1] == kinds[_kind(event)], agreement, _DIFFERENT)
    pairs, shift = [], most
    for index in range(len(shorter) - 1, -1, -1):
        if _kind(shorter[index]) == _kind(longer[index + shift]):
            pairs.append((index, index + shift))
        shift = int(came_from[index][shift])
    return pairs[::-1] if len(pairs) >= _ALIKE * len(shorter) else None


def _kind(event: Event) -> tuple[str, bool]:
    return event.category, event.num_bytes < 0
