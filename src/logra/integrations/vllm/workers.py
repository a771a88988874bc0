"""The workers of an engine among themselves: an error on one is an error of all, told once.

vLLM's multi-process executor reads the answers of its workers in order and stops at the first error. Answers of later
workers stay in their queues and are taken for those of the next call, which leaves the engine out of step for good. So
workers first tell each other whether they failed, and then only the last one raises.

Contract: every worker makes the same calls in the same order; `gather` and `first_failure` are collective.
"""

from typing import Any, Protocol

import torch.distributed as dist

from logra import errors
from logra.errors import LograError, SyncError


class Group(Protocol):
    """vLLM's group of the workers that share a model, in the order in which their answers are read."""

    rank_in_group: int
    world_size: int
    cpu_group: Any


class Workers:
    """All workers that hold a part of one model.

    Args:
        group: of them; None for a worker alone.
        all_raise: every worker raises. For workers that are called by processes of their own.
    """

    def __init__(self, group: Group | None = None, *, all_raise: bool = False) -> None:
        self._group = group if group is not None and group.world_size > 1 else None
        self._raises = self._group is None or all_raise or self._group.rank_in_group == self._group.world_size - 1

    @property
    def is_alone(self) -> bool:
        """There is one worker, and it has all weights."""
        return self._group is None

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._group.world_size
        dist.all_gather_object(values, value, group=self._group.cpu_group)
        return values

    def first_failure(self, error: Exception | None) -> LograError | None:
        """The error of this worker or, if it has none, of the first that has one; None if no worker failed.

        Args:
            error: of this worker; None if it did not fail.
        """
        own = None if error is None else (type(error).__name__, str(error))
        failures = [failure for failure in self.gather(own) if failure is not None]
        if not failures:
            return None
        kind, text = own or failures[0]
        found = getattr(errors, kind, None)
        if isinstance(found, type) and issubclass(found, LograError):
            return found(text)
        return SyncError(f"{kind}: {text}")

    def tell(self, failure: LograError) -> None:
        """Raise an error that all workers have come to, on the one worker that speaks for all."""
        if self._raises:
            raise failure


def workers_of(vllm_config: Any) -> Workers:
    """The workers of the engine that this process is a worker of.

    Raises:
        SyncError: pipeline parallelism, under which a worker cannot know the shapes of the weights of others.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise SyncError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: an engine that follows updates must hold every "
            f"layer on each worker. Use tensor parallelism"
        )
    from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

    return Workers(get_tp_group(), all_raise=parallel.distributed_executor_backend == "external_launcher")
