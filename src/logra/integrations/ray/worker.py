"""What runs inside an actor: an engine that holds a copy of the policy, and samples with the version asked for.

Contract: groups are sampled with exactly the version that was asked for, or not at all.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from logra.errors import SyncError
from logra.integrations.ray.messages import Answer, Group, Sample, WorkerSettings
from logra.sync import Manifest
from logra.sync.protocols import UpdateLog


class Engine(Protocol):
    """A copy of the policy that samples."""

    @property
    def version(self) -> int:
        """Of its weights."""
        ...

    def catch_up(self, log: UpdateLog, until: int) -> None:
        """Apply the updates of the log up to this version, which is not below its own."""
        ...

    def draw(self, groups: Sequence[Group]) -> Sequence[tuple[list[int], list[float] | None]]:
        """Token ids of every sample of the groups, in order, and their log-probabilities where they are measured."""
        ...


class RolloutWorker:
    """An engine that follows a log.

    Args:
        settings: which engine, and how it samples.
        log: the updates of the run; it must have begun.

    Raises:
        SyncError: the log has not begun.
        ConfigError: the engine's package is not installed.
    """

    def __init__(self, settings: WorkerSettings, log: UpdateLog) -> None:
        torch.set_num_threads(settings.num_threads)
        manifest = log.manifest
        if manifest is None:
            raise SyncError("rollout worker: the log has not begun: nothing has been published, or its path is wrong")
        self._log = log
        self.engine = build_engine(settings, manifest)

    def join(self, version: int) -> None:
        """Catch up from the log, up to `version` or as far as the log goes."""
        target = min(version, self._log.latest())
        if target >= self.engine.version:
            self.engine.catch_up(self._log, target)

    def sample(self, groups: Sequence[Group], version: int) -> Answer:
        """Draw the samples of some groups with this version of the policy."""
        start = time.perf_counter()
        self.join(version)
        seconds = time.perf_counter() - start
        samples = []
        if self.engine.version == version:
            drawn = self.engine.draw(groups)
            samples = [Sample(token_ids, self.engine.version, log_probs) for token_ids, log_probs in drawn]
        return Answer(self.engine.version, samples, seconds)


def build_engine(settings: WorkerSettings, manifest: Manifest) -> Engine:
    """The engine that the settings name, with the weights of the run's base model."""
    engine: Any
    if settings.engine == "vllm":
        from logra.integrations.ray.vllm_engine import VLLMSampler as engine
    else:
        from logra.integrations.ray.transformers_engine import TransformersSampler as engine
    return engine(settings, manifest)
