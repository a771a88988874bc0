"""Marks of what a training step is doing, and what the memory it takes is for. The memory ledger reads them.

    with phase("recover"): ...             which part of the step runs
    with purpose("projections"): ...       what the tensors allocated inside are, whatever the phase

Marks cost two list operations. They are global to the process and not to a thread: autograd runs backward in threads of
its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("rollout", "forward", "backward", "recover", "probe", "update", "sync")
"""The phases of a step in their order. Forward and backward need no marks: the ledger recognises them."""

_phases: list[str] = []
_purposes: list[str] = []
_listeners: list[Callable[[], None]] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The time inside belongs to this phase (the innermost mark counts)."""
    assert name in PHASES, name
    _notify()
    _phases.append(name)
    try:
        yield
    finally:
        _notify()
        _phases.pop()


@contextmanager
def purpose(category: str) -> Iterator[None]:
    """Tensors allocated inside are of this category of the ledger (the innermost mark counts)."""
    _purposes.append(category)
    try:
        yield
    finally:
        _purposes.pop()


def current_phase() -> str | None:
    """The innermost marked phase."""
    return _phases[-1] if _phases else None


def current_purpose() -> str | None:
    """The innermost marked purpose."""
    return _purposes[-1] if _purposes else None


@contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """`listener` is called before every change of phase."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _notify() -> None:
    for listener in _listeners:
        listener()
