"""What a guard has noticed: one line of events.jsonl."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """A guard spoke or acted.

    Attributes:
        step: optimizer step, from 1.
        kind: name of the guard.
        value: what it saw, in the unit of its threshold.
        threshold: from which on it speaks; None where there is none.
        action: what was done: warn, skip, rollback, stop, drop, resample or reset.
        detail: what else there is to know.
    """

    step: int
    kind: str
    value: float
    threshold: float | None
    action: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return asdict(self)

    def __str__(self) -> str:
        limit = "" if self.threshold is None else f" (threshold {self.threshold:g})"
        detail = self.detail and f": {self.detail}"
        return f"step {self.step}: {self.kind} {self.value:.4g}{limit}, {self.action}{detail}"


Subscriber = Callable[[Event], None]
