"""`RayPool`: rollout workers as Ray actors.

Where Ray runs already (in this process, or named by RAY_ADDRESS) the actors are placed there. Otherwise a Ray of this
machine alone is started, without dashboard and without usage reports, and ends with this process.
"""

import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from logra.errors import ConfigError, LograError
from logra.integrations.ray.fleet import Answered, Event, Failed, Gone, Joined, Lost
from logra.integrations.ray.messages import Group, WorkerSettings
from logra.integrations.ray.worker import RolloutWorker
from logra.sync.protocols import UpdateLog

_OBJECT_STORE_BYTES = 128 * 2**20
"""Shared memory of a Ray that is started here; answers are a few kilobytes and pass it by."""


class RayPool:
    """The workers of a fleet.

    Args:
        settings: how they load and sample.
        log: of the run; copied to every worker, so that its folder or address must mean the same there.
        num_workers: actors.
        num_gpus: that each reserves.
        max_restarts: of each.

    Raises:
        ConfigError: Ray is not installed, or has fewer CPUs or GPUs than the workers reserve.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        log: UpdateLog,
        *,
        num_workers: int,
        num_gpus: float = 0.0,
        max_restarts: int,
    ) -> None:
        require_ray()
        _connect(num_workers * settings.num_threads)
        import ray

        _require_resources(num_workers * settings.num_threads, num_workers * num_gpus)
        actor: Any = ray.remote(num_cpus=settings.num_threads, num_gpus=num_gpus, max_restarts=max_restarts)(
            RolloutWorker
        )
        self.num_workers = num_workers
        self._actors: list[Any] = [actor.remote(settings, log) for _ in range(num_workers)]
        self._waiting_for: dict[Any, tuple[int, bool]] = {}
        """What has been asked: of which worker, and whether it is to join."""

    def submit(self, worker: int, groups: Sequence[Group], version: int) -> None:
        """See `Pool.submit`."""
        self._waiting_for[self._actors[worker].sample.remote(groups, version)] = (worker, False)

    def rejoin(self, worker: int, version: int) -> None:
        """See `Pool.rejoin`. A call with retries waits until Ray has started the actor again."""
        joining = self._actors[worker].join.options(max_task_retries=-1).remote(version)
        self._waiting_for[joining] = (worker, True)

    def restart(self, worker: int, version: int) -> None:
        """See `Pool.restart`."""
        import ray

        self._waiting_for = {ref: asked for ref, asked in self._waiting_for.items() if asked[0] != worker}
        ray.kill(self._actors[worker], no_restart=False)
        self.rejoin(worker, version)

    def wait(self, timeout_s: float) -> Event | None:
        """See `Pool.wait`."""
        import ray

        ready, _ = ray.wait(list(self._waiting_for), num_returns=1, timeout=timeout_s)
        return self._event(ready[0]) if ready else None

    def close(self) -> None:
        """See `Pool.close`."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._waiting_for = [], {}

    def _event(self, ref: Any) -> Event:
        import ray
        from ray.exceptions import (
            NodeDiedError,
            ObjectLostError,
            OutOfMemoryError,
            RayActorError,
            RayError,
            RayTaskError,
        )

        worker, joins = self._waiting_for.pop(ref)
        try:
            result: Any = ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            kind = "" if isinstance(cause, LograError) else f"{type(cause).__name__}: "
            return Failed(worker, f"{kind}{cause}", error)
        except RayActorError as error:
            # Only a call that waits for the restart can tell that there is none.
            return Gone(worker, _reason(error)) if joins else Lost(worker, _reason(error))
        except (NodeDiedError, ObjectLostError, OutOfMemoryError) as error:
            return Lost(worker, f"{type(error).__name__}: {_reason(error)}")
        except RayError as error:
            return Failed(worker, f"{type(error).__name__}: {_reason(error)}", error)
        return Joined(worker) if joins else Answered(worker, result)


def _reason(error: Exception) -> str:
    """One line of what Ray says: where the worker could not be built, the error that it met."""
    lines = [line for line in str(error).splitlines() if line.strip()] or ["Ray gives no reason"]
    return lines[-1] if "creation task" in lines[0] else lines[0]


def require_ray() -> None:
    """Refuse to go on without Ray.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed. Run: pip install 'logra[ray]'")


def _connect(num_cpus: int) -> None:
    """Connect to Ray, once in this process; `num_cpus` are what a Ray that is started here has to give."""
    import ray

    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with _handlers_kept():
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**quiet)
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **quiet,
        )


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray puts its own handler of SIGTERM over that of the run, which ends it between two steps."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _require_resources(num_cpus: float, num_gpus: float) -> None:
    """Refuse what Ray could not place: it would wait for it forever."""
    import ray

    there = ray.cluster_resources()
    for name, wanted in (("CPU", num_cpus), ("GPU", num_gpus)):
        if there.get(name, 0) < wanted:
            raise ConfigError(
                f"rollout workers: they reserve {wanted:g} {name}s, Ray has {there.get(name, 0):g}. Take fewer workers, "
                f"less for each, or name a larger Ray cluster in RAY_ADDRESS"
            )
