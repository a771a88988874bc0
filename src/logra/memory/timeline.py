"""Peaks and their composition, from the events of a step.

What a storage is may be known only later (a gradient is found in `.grad` when backward has ended), so events are kept as
they come and added up by category when the step is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from logra.memory.categories import CATEGORIES, OTHER_SHARE
from logra.phases import PHASES


class Categorised(Protocol):
    """A storage's record; its category may change until the step is settled."""

    category: str


@dataclass(frozen=True)
class PhasePeak:
    """The highest moment of a phase.

    Attributes:
        peak_bytes: live bytes at that moment.
        at_peak: the same by category.
    """

    peak_bytes: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)


class Event(NamedTuple):
    """A storage came (bytes above 0), went, or changed its size."""

    phase: str
    category: str
    num_bytes: int


@dataclass(frozen=True)
class Moments:
    """A step, event by event.

    Attributes:
        start: live bytes by category before the first.
        events: in order.
        resident: live bytes by category after the last.
    """

    start: Mapping[str, int]
    events: Sequence[Event]
    resident: Mapping[str, int]


@dataclass(frozen=True)
class Report:
    """Live tensor bytes of a training process.

    Attributes:
        peak_bytes: the most over all phases.
        peak_phase: where that was.
        at_peak: by category at that moment; the sum is `peak_bytes`.
        resident: by category between steps.
        phases: highest moment of every phase that ran.
    """

    peak_bytes: int
    peak_phase: str
    at_peak: Mapping[str, int]
    resident: Mapping[str, int]
    phases: Mapping[str, PhasePeak]

    @classmethod
    def of(cls, phases: Mapping[str, PhasePeak], resident: Mapping[str, int]) -> "Report":
        """The report of these phases.

        Args:
            phases: highest moment of every phase that ran.
            resident: live bytes by category between steps.
        """
        known = {name: phases[name] for name in PHASES if name in phases}
        name = max(known, key=lambda phase: known[phase].peak_bytes, default="update")
        highest = known.get(name, PhasePeak(sum(resident.values()), resident))
        return cls(highest.peak_bytes, name, highest.at_peak, resident, known)

    def to_dict(self) -> dict[str, Any]:
        """As JSON stores it."""
        return asdict(self)

    @property
    def other_share(self) -> float:
        """Share of the peak whose category is unknown; above `OTHER_SHARE` is a defect."""
        return self.at_peak.get("other", 0) / max(self.peak_bytes, 1)

    @property
    def is_complete(self) -> bool:
        """Whether at most 3 % of the peak are of no known category."""
        return self.other_share <= OTHER_SHARE


class Timeline:
    """Collects events and keeps the highest moments."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self._start: dict[str, int] = {}
        self._events: list[tuple[Categorised, int, str]] = []
        self._present: dict[Categorised, int] = {}
        self._peaks: dict[str, PhasePeak] = {}
        self._resident: Mapping[str, int] = {}

    def add(self, record: Categorised, num_bytes: int, phase: str) -> None:
        """A storage has come (num_bytes above 0), gone or changed its size."""
        self.live_bytes += num_bytes
        self._events.append((record, num_bytes, phase))

    def begin(self) -> None:
        """What has come so far was there before the first phase."""
        self._absorb()

    def settle(self, resident: Mapping[str, int]) -> None:
        """Find the highest moment of every phase since the last call, and forget the events.

        Args:
            resident: live bytes by category now.
        """
        start = sum(self._present.values())
        total, best = start, {}
        for index, (_, num_bytes, name) in enumerate(self._events):
            total += num_bytes
            if num_bytes > 0 and total > best.get(name, (-1, -1))[0]:
                best[name] = (total, index)
        moments = {index: name for name, (_, index) in best.items()}
        composition = dict.fromkeys(CATEGORIES, 0)
        for record, num_bytes in self._present.items():
            composition[record.category] += num_bytes
        for index, (record, num_bytes, _) in enumerate(self._events):
            composition[record.category] += num_bytes
            if index in moments:
                name, total = moments[index], sum(composition.values())
                if total > self._peaks.get(name, PhasePeak()).peak_bytes:
                    self._peaks[name] = PhasePeak(total, dict(composition))
        self._absorb()
        self._resident = dict(resident)

    def moments(self, resident: Mapping[str, int]) -> Moments:
        """Every event since the last `settle` or `restart`.

        Args:
            resident: live bytes by category now.
        """
        start = dict.fromkeys(CATEGORIES, 0)
        for record, num_bytes in self._present.items():
            start[record.category] += num_bytes
        events = [Event(phase, record.category, num_bytes) for record, num_bytes, phase in self._events]
        return Moments(start, events, dict(resident))

    def restart(self) -> None:
        """Forget the peaks; what is alive stays."""
        self._absorb()
        self._peaks.clear()

    def _absorb(self) -> None:
        for record, num_bytes, _ in self._events:
            self._present[record] = self._present.get(record, 0) + num_bytes
            if self._present[record] == 0:
                del self._present[record]
        self._events.clear()

    def report(self) -> Report:
        """What the settled steps came to."""
        return Report.of(self._peaks, self._resident)
