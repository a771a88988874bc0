"""`Guards`: watches a run step by step, says what is to be done, and remembers which versions were sound.

The order of one step: `before_merge` (may skip it), the merge, `after_merge`, then `verdict` (go on, roll back, stop), and
`end_step`. It holds numbers only and touches neither model nor optimizer: the trainer acts.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from logra.rl.guards import sentinels
from logra.rl.guards.config import STRENGTH, GuardsConfig
from logra.rl.guards.events import Event, Subscriber
from logra.rl.guards.reference import ReferenceSchedule


class Guards:
    """The guards of one run.

    Args:
        config: which are on.

    Example:
        >>> guards = Guards(GuardsConfig())
        >>> guards.subscribe(print)
    """

    def __init__(self, config: GuardsConfig) -> None:
        self.config = config
        self.reference = ReferenceSchedule(config.reference)
        self.reference_version = 0
        """Policy version that the reference has the weights of."""
        self.num_rollbacks = 0
        self.budget_scale = 1.0
        """What the KL budget (or the learning rate) has been multiplied by, over all rollbacks."""
        self.counts: Counter[str] = Counter()
        """Events so far, by kind."""
        self._history: deque[dict[str, float]] = deque(maxlen=config.sentinels.window)
        self._versions: deque[tuple[int, bool]] = deque(maxlen=config.rollback.lag + config.sentinels.window)
        self._base_version = 0
        self._events_of_step: list[Event] = []
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with every event from now on."""
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> None:
        """Count an event and pass it on."""
        self.counts[event.kind] += 1
        for subscriber in self._subscribers:
            subscriber(event)

    # ---- a step ----

    def before_merge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Look at rollout and loss of a step.

        Returns:
            Whether its update is to be skipped.
        """
        self._history.append(dict(metrics))
        self._events_of_step = []
        self._look(sentinels.BEFORE_THE_MERGE, step)
        return self._strongest() in ("skip", "rollback")

    def after_merge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at what the step has done to the weights.

        Args:
            step: number of the step.
            metrics: all metrics of the step.
        """
        self._history[-1] = dict(metrics)
        self._look(sentinels.AFTER_THE_MERGE, step)

    def verdict(self) -> str:
        """What is to be done now: "go on", "rollback" or "stop"."""
        strongest = self._strongest()
        if strongest == "rollback" and self.num_rollbacks >= self.config.rollback.max_rollbacks:
            return "stop"
        return strongest if strongest in ("rollback", "stop") else "go on"

    def end_step(self, version: int) -> None:
        """Remember the version that the step led to, and whether it is sound."""
        harmless = ("off", "warn")
        self._versions.append((version, all(event.action in harmless for event in self._events_of_step)))

    # ---- rollback ----

    def begin(self, version: int) -> None:
        """The run starts (or goes on) with the weights of `version`, which are taken to be good."""
        self._versions.clear()
        self._base_version = version

    def good_version(self) -> int:
        """The newest sound version that is `rollback.lag` steps older than the last one; the first one where none is."""
        settled = list(self._versions)[: -self.config.rollback.lag]
        return next((version for version, sound in reversed(settled) if sound), self._base_version)

    def rolled_back(self, step: int, *, to_version: int, as_version: int) -> None:
        """Record a rollback: the history of the weights that were given up no longer counts."""
        self.num_rollbacks += 1
        self.budget_scale *= self.config.rollback.budget_factor
        self._history.clear()
        self.begin(as_version)
        detail = (
            f"weights of version {to_version} are now version {as_version}; budget x {self.budget_scale:g}, new seed"
        )
        value = float(to_version)
        self.emit(Event(step=step, kind="rollback", value=value, threshold=None, action="rollback", detail=detail))

    # ---- numbers ----

    def metrics(self) -> dict[str, float]:
        """Events so far: in all (`guards/events`) and by kind, for every kind that has occurred."""
        totals = {f"guards/{kind}_events": float(count) for kind, count in sorted(self.counts.items())}
        return {"guards/events": float(self.counts.total()), **totals}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain numbers and lists (JSON)."""
        return {
            "history": list(self._history),
            "versions": [list(entry) for entry in self._versions],
            "base_version": self._base_version,
            "counts": dict(self.counts),
            "num_rollbacks": self.num_rollbacks,
            "budget_scale": self.budget_scale,
            "reference_version": self.reference_version,
            "reference": self.reference.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict()` returned."""
        self._history.clear()
        self._history.extend(dict(entry) for entry in state["history"])
        self._versions.clear()
        self._versions.extend((int(version), bool(sound)) for version, sound in state["versions"])
        self._base_version = state["base_version"]
        self.counts = Counter(state["counts"])
        self.num_rollbacks, self.budget_scale = state["num_rollbacks"], state["budget_scale"]
        self.reference_version = state["reference_version"]
        self.reference.load_state_dict(state["reference"])

    def _look(self, measures: Mapping[str, sentinels.Measure], step: int) -> None:
        for event in sentinels.check(measures, list(self._history), self.config.sentinels, step):
            self._events_of_step.append(event)
            self.emit(event)

    def _strongest(self) -> str:
        return max((event.action for event in self._events_of_step), key=STRENGTH.index, default="off")
