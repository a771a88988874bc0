"""Tells the session of a worker when vLLM puts the worker to sleep and wakes it up.

Level 1 moves the weights to host memory and back, which loses nothing. Level 2 drops them. A worker that sleeps must not
even be asked for its weights: their memory is unmapped.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from logra.integrations.vllm.session import Session

_MARK = "_logra_watched"
SESSION = "_logra_session"
"""Attribute of a worker that holds the session of the extension; a backend holds its own."""


def watch_sleep() -> None:
    """Let vLLM's workers in this process tell their sessions of sleep; may be called any number of times."""
    from vllm.v1.worker.gpu_worker import Worker  # pyright: ignore[reportMissingImports]

    if not hasattr(Worker.sleep, _MARK):
        Worker.sleep = telling_of_sleep(Worker.sleep)
        Worker.wake_up = telling_of_waking(Worker.wake_up)


def session_of(worker: Any) -> Session | None:
    """The session of a worker: that of its backend, else that of its extension; None before there is one."""
    session = getattr(getattr(worker, "weight_transfer_engine", None), "session", None)
    session = getattr(worker, SESSION, None) if session is None else session
    return session if isinstance(session, Session) else None


def telling_of_sleep(sleep: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method `sleep(level)` that tells the worker's session first."""

    @wraps(sleep)
    def watched(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        if session is not None and level >= 1:
            session.fall_asleep(drops_weights=level >= 2)
        return sleep(self, level, *args, **kwargs)

    setattr(watched, _MARK, True)
    return watched


def telling_of_waking(wake_up: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method `wake_up(tags)` that tells the worker's session once the memory of the weights is back."""

    @wraps(wake_up)
    def watched(self: Any, tags: list[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        result = wake_up(self, tags, *args, **kwargs)
        session = session_of(self)
        if session is not None and (tags is None or "weights" in tags):
            session.awake()
        return result

    return watched
