"""What runs inside an actor: a replica of the policy and the generation that `logra train` uses without workers.

Contract: a group is sampled with exactly the version that was asked for, or not at all. The numbers depend on the weights,
the group and the settings alone, so that any worker draws the same samples of a group, now or after a restart.
"""

import itertools
import os
import socket
import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from logra.errors import SyncError
from logra.integrations.ray.messages import Answer, Group, Sample, Status, WorkerSettings
from logra.rl.shared_prompts import can_share_prompts, continues_prefill, shared_prefill
from logra.sync import Replica
from logra.sync.protocols import UpdateLog


class RolloutWorker:
    """A replica that samples.

    Args:
        settings: how.
        log: the updates of the run; it must have begun.

    Raises:
        SyncError: the log has not begun.
    """

    def __init__(self, settings: WorkerSettings, log: UpdateLog) -> None:
        torch.set_num_threads(settings.num_threads)
        manifest = log.manifest
        if manifest is None:
            raise SyncError("rollout worker: the log has not begun: nothing has been published, or its path is wrong")
        self._log = log
        self._device = torch.device("cuda" if settings.on_gpu else "cpu")
        self._autocast = settings.autocast
        self._generation = GenerationConfig(**settings.generation, disable_compile=True)
        self._model = _load(settings).to(self._device)
        # Generation fills in what its configuration leaves open from that of the model.
        self._model.generation_config = self._generation
        self._shares_prompts = can_share_prompts(self._model) and continues_prefill(self._generation)
        self._replica = Replica(self._model, version=manifest.base.version, storage=settings.storage)

    def join(self, version: int) -> Status:
        """Catch up from the log, up to `version` or as far as the log goes."""
        target = min(version, self._log.latest())
        if target >= self._replica.version:
            self._replica.catch_up(self._log, until=target)
        return Status(os.getpid(), socket.gethostname(), self._replica.version)

    def sample(self, group: Group, version: int) -> Answer:
        """Draw the samples of a group with this version of the policy."""
        start = time.perf_counter()
        self.join(version)
        seconds = time.perf_counter() - start
        samples = []
        if self._replica.version == version:
            samples = [Sample(token_ids, self._replica.version) for token_ids in self._draw(group)]
        return Answer(self._replica.version, samples, seconds)

    @torch.no_grad()
    def _draw(self, group: Group) -> list[list[int]]:
        torch.manual_seed(group.seed)
        ids = torch.tensor([group.prompt_ids], device=self._device).repeat(group.num_samples, 1)
        shared = shared_prefill(self._model) if self._shares_prompts else nullcontext()
        with shared, torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            output = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=self._generation
            )
        ends: Any = self._generation.eos_token_id
        return [_up_to_end(row, set(ends)) for row in output[:, ids.shape[1] :].tolist()]


def _load(settings: WorkerSettings) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype), attn_implementation=settings.attention
    )
    return model.requires_grad_(False).eval()


def _up_to_end(token_ids: list[int], ends: set[int]) -> list[int]:
    """The tokens before the first end-of-sequence token, and that token."""
    length = sum(1 for _ in itertools.takewhile(lambda token: token not in ends, token_ids))
    return token_ids[: length + 1]
