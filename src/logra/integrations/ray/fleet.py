"""`Fleet`: deals groups of samples to workers, whatever happens to the workers.

    a worker dies                          its groups go to the next free worker, and it is started again
    it is behind the version asked for     its samples are refused; it is asked again when the log may have grown
    it is ahead                            its samples are refused, and it is started again from the base model
    nobody answers                         the workers that are busy are started again, once
    it meets an error of its own           the call raises it; the worker can be asked again

Contract: `sample` returns every sample of every group, each of the version that was asked for, in the order of the groups,
or raises. Groups carry their seeds, so the samples are the same whichever worker draws them.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from logra.errors import SyncError
from logra.integrations.ray.messages import Answer, Group, Sample

logger = logging.getLogger("logra")


@dataclass(frozen=True)
class Answered:
    """A worker has answered."""

    worker: int
    answer: Answer


@dataclass(frozen=True)
class Joined:
    """A worker that was started again serves."""

    worker: int


@dataclass(frozen=True)
class Lost:
    """A worker has died; what it was asked is lost."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Gone:
    """A worker that was lost could not be started again."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Failed:
    """A worker, or what runs it, met an error that no restart helps. The worker can be asked again."""

    worker: int
    reason: str
    error: Exception


Event = Answered | Joined | Lost | Gone | Failed


class Pool(Protocol):
    """The workers themselves, known by their numbers from 0."""

    num_workers: int

    def submit(self, worker: int, groups: Sequence[Group], version: int) -> None:
        """Ask a worker that is not busy for some groups."""
        ...

    def rejoin(self, worker: int, version: int) -> None:
        """Expect `Joined` when a worker that was lost serves again."""
        ...

    def restart(self, worker: int, version: int) -> None:
        """Kill a worker, forget what it was asked, and expect `Joined`."""
        ...

    def wait(self, timeout_s: float) -> Event | None:
        """The next event; None if there was none in this time."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Fleet:
    """Samples with the workers of a pool.

    Args:
        pool: the workers.
        timeout_s: seconds without any event after which busy workers are started again; after a second time it is an
            error. Also the longest time that workers may stay behind the version asked for.
        retry_s: seconds before a worker that is behind is asked again.
        in_shares: ask each worker for its share of all groups at once, as engines that batch requests themselves want it;
            otherwise for one group after the other, so that the fastest worker draws most.

    Example:
        >>> fleet = Fleet(RayPool(settings, log, num_workers=2, max_restarts=10), timeout_s=600)
        >>> samples = fleet.sample([Group(prompt_ids=(5, 7), num_samples=8, seed=1)], version=opt.version)
    """

    def __init__(self, pool: Pool, *, timeout_s: float, retry_s: float = 0.2, in_shares: bool = False) -> None:
        self._pool = pool
        self._timeout_s, self._retry_s, self._in_shares = timeout_s, retry_s, in_shares
        self._idle = set(range(pool.num_workers))
        self._gone: dict[int, str] = {}
        self._behind_since: float | None = None
        self._was_silent = False
        self.num_refused = 0
        """Samples that were refused so far, because they were not of the version asked for."""
        self.num_lost = 0
        """Times that a worker died or fell silent so far."""
        self.catch_up_s = 0.0
        """Longest time that a worker took for catching up in the last call of `sample`, seconds."""

    def sample(self, groups: Sequence[Group], version: int) -> list[Sample]:
        """Draw samples with one version of the policy.

        Args:
            groups: what to draw.
            version: of the policy; the log must hold it.

        Returns:
            The samples of all groups, in order.

        Raises:
            SyncError: no worker is left, or none answers; or none comes to this version, one met an error of its own, or one
                drew another number of samples: after these three the fleet can be asked again.
        """
        self.catch_up_s, self._behind_since, self._was_silent = 0.0, None, False
        drawn: dict[int, Sequence[Sample]] = {}
        running: dict[int, int] = {}
        size = max(math.ceil(len(groups) / self._pool.num_workers), 1) if self._in_shares else 1
        requests = [groups[start : start + size] for start in range(0, len(groups), size)]
        waiting = deque(range(len(requests)))
        while len(drawn) < len(requests):
            while waiting and self._idle:
                worker = min(self._idle)
                self._idle.remove(worker)
                running[worker] = waiting.popleft()
                self._pool.submit(worker, requests[running[worker]], version)
            event = self._pool.wait(self._timeout_s)
            if event is None:
                self._restart_silent(list(running), version)
                waiting.extendleft(running.values())
                running = {}
                continue
            index = running.pop(event.worker, None)
            if index is not None and isinstance(event, Answered):
                if self._accept(event, requests[index], version):
                    drawn[index] = event.answer.samples
                    continue
            elif index is not None and isinstance(event, Failed):
                self._idle.add(event.worker)
                raise SyncError(f"rollout worker {event.worker}: {event.reason}") from event.error
            else:
                self._note(event, version)
            if index is not None:
                waiting.appendleft(index)
        return [sample for index in range(len(requests)) for sample in drawn[index]]

    def close(self) -> None:
        """End the workers; the fleet is of no use afterwards."""
        self._pool.close()

    def _accept(self, event: Answered, groups: Sequence[Group], version: int) -> bool:
        """Whether the samples are those of the groups, each of this version; what becomes of the worker if not."""
        worker, answer = event.worker, event.answer
        self.catch_up_s = max(self.catch_up_s, answer.catch_up_s)
        num_samples = sum(group.num_samples for group in groups)
        if [sample.version for sample in answer.samples] == [version] * num_samples:
            self._idle.add(worker)
            self._behind_since, self._was_silent = None, False
            return True
        if answer.version == version and len(answer.samples) != num_samples:
            self._idle.add(worker)
            raise SyncError(
                f"rollout worker {worker} drew {len(answer.samples)} samples with version {version}, and {num_samples} were "
                f"asked for: does it run another version of logra?"
            )
        self.num_refused += num_samples
        if answer.version > version:
            logger.warning("rollout worker %d is at version %d, ahead of %d: it starts again from the base model",
                           worker, answer.version, version)  # fmt: skip
            self._pool.restart(worker, version)
            return False
        self._idle.add(worker)
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        if now - self._behind_since > self._timeout_s:
            raise SyncError(
                f"rollout worker {worker} is at version {answer.version}, and samples of version {version} are wanted: the "
                f"log that it reads has not come to that version in {self._timeout_s:g} s. Is it the log of this run?"
            )
        time.sleep(self._retry_s)
        return False

    def _note(self, event: Event, version: int) -> None:
        """What an event without samples for this call says of its worker."""
        match event:
            case Joined(worker) | Answered(worker):  # the latter is left over from a call that was interrupted
                self._idle.add(worker)
            case Failed(worker, reason):  # asked for samples, it meets the same error again if that persists
                logger.warning("rollout worker %d: %s", worker, reason)
                self._idle.add(worker)
            case Lost(worker, reason):
                logger.warning("rollout worker %d died and is started again: %s", worker, reason)
                self.num_lost += 1
                self._pool.rejoin(worker, version)
            case Gone(worker, reason):
                self._gone[worker] = reason
                if len(self._gone) == self._pool.num_workers:
                    raise SyncError(f"rollout workers: none is left. The last one, worker {worker}: {reason}")
                logger.warning("rollout worker %d is dead and not started again: %s", worker, reason)

    def _restart_silent(self, workers: Sequence[int], version: int) -> None:
        if self._was_silent or not workers:
            raise SyncError(
                f"rollout workers: none of {self._pool.num_workers} has answered for {self._timeout_s:g} s"
                f"{', and starting them again did not help' if self._was_silent else ''}"
            )
        self._was_silent = True
        for worker in workers:
            logger.warning("rollout worker %d has not answered for %g s: it is started again", worker, self._timeout_s)
            self.num_lost += 1
            self._pool.restart(worker, version)
