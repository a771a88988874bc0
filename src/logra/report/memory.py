"""Memory by category and phase, and time by phase: stacked bars and the numbers behind them."""

from dataclasses import dataclass

from logra.report.groups import Group
from logra.report.run import Run
from logra.report.series import mean_of, metric

GIB, MIB = 2.0**30, 2.0**20
NUM_NAMED = 7
"""Categories with a colour of their own; what is left is added up."""
REST = "all other"
BETWEEN_STEPS = "between steps"


@dataclass(frozen=True)
class Stacks:
    """Rows of stacked bars."""

    categories: list[str]
    """From the largest to the smallest; the last may be `REST`."""
    rows: list[tuple[str, list[float]]]
    """(label, a value for each category)."""
    unit: str


def memory_stacks(groups: list[Group]) -> Stacks | None:
    """Live bytes at the peak of every phase, and between steps, of the first run of every group that recorded them."""
    found: list[tuple[str, dict[str, float]]] = []
    for group in groups:
        run = next((run for run in group.runs if _phases(run)), None)
        if run is not None:
            prefix = f"{group.label}: " if len(groups) > 1 else ""
            found += [(prefix + phase, sizes) for phase, sizes in _phases(run).items()]
    if not found:
        return None
    totals: dict[str, float] = {}
    for _, sizes in found:
        for category, num_bytes in sizes.items():
            totals[category] = max(totals.get(category, 0.0), num_bytes)
    present = sorted((category for category, most in totals.items() if most > 0), key=lambda name: -totals[name])
    named, rest = present[:NUM_NAMED], present[NUM_NAMED:]
    largest = max(sum(sizes.values()) for _, sizes in found)
    scale, unit = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    rows = []
    for label, sizes in found:
        values = [sizes.get(category, 0.0) / scale for category in named]
        rows.append((label, [*values, sum(sizes.get(category, 0.0) for category in rest) / scale] if rest else values))
    return Stacks([name.replace("_", " ") for name in named] + [REST] * bool(rest), rows, unit)


def time_stacks(groups: list[Group]) -> Stacks | None:
    """Mean seconds of a step by phase."""
    categories = ["rollout and rewards", "forward, backward, step", "trust region's probe", "publishing the update"]
    rows = []
    for group in groups:
        parts = [phase_seconds(run) for run in group.runs]
        known = [part for part in parts if part is not None]
        if known:
            rows.append((group.label, [sum(part[i] for part in known) / len(known) for i in range(len(categories))]))
    return Stacks(categories, rows, "s per step") if rows else None


def phase_seconds(run: Run) -> list[float] | None:
    """Mean seconds of a step: rollout, update without what follows, probe, publishing. None where they are not logged."""
    rollout, update = mean_of(run, metric("time/rollout_s")), mean_of(run, metric("time/update_s"))
    if rollout is None or update is None:
        return None
    probe = mean_of(run, metric("time/probe_s")) or 0.0
    publish = mean_of(run, metric("sync/seconds")) or 0.0
    return [rollout, max(update - probe - publish, 0.0), probe, publish]


def _phases(run: Run) -> dict[str, dict[str, float]]:
    """Bytes by category of each phase that memory.json has."""
    phases = {name: phase["at_peak"] for name, phase in (run.memory.get("phases") or {}).items()}
    resident = run.memory.get("resident")
    return phases | ({BETWEEN_STEPS: resident} if resident else {})
