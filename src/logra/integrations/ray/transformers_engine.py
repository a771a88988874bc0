"""`TransformersSampler`: a replica of the policy, and the generation that `logra train` uses without workers.

Contract: the samples of a group depend on the weights, the group and the settings alone, so that any worker draws the same
ones, now or after a restart. Each group is a batch of its own: what else is in a batch changes how its rows are rounded.
"""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from logra.integrations.ray.messages import Group, WorkerSettings
from logra.rl.shared_prompts import can_share_prompts, continues_prefill, shared_prefill
from logra.sync import Manifest, Replica
from logra.sync.protocols import UpdateLog


class TransformersSampler:
    """See `logra.integrations.ray.worker.Engine`.

    Args:
        settings: how it loads and samples.
        manifest: of the run.
    """

    def __init__(self, settings: WorkerSettings, manifest: Manifest) -> None:
        self._device = torch.device("cuda" if settings.on_gpu else "cpu")
        self._autocast = settings.autocast
        self._generation = GenerationConfig(**settings.generation, disable_compile=True)
        self.model = _load(settings).to(self._device)
        # Generation fills in what its configuration leaves open from that of the model.
        self.model.generation_config = self._generation
        self._shares_prompts = can_share_prompts(self.model) and continues_prefill(self._generation)
        self._replica = Replica(self.model, version=manifest.base.version, storage=settings.storage)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._replica.version

    def catch_up(self, log: UpdateLog, until: int) -> None:
        """See `Engine.catch_up`."""
        self._replica.catch_up(log, until=until)

    def draw(self, groups: Sequence[Group]) -> list[tuple[list[int], None]]:
        """See `Engine.draw`; log-probabilities are not measured."""
        return [(token_ids, None) for group in groups for token_ids in self._draw(group)]

    @torch.no_grad()
    def _draw(self, group: Group) -> list[list[int]]:
        torch.manual_seed(group.seed)
        ids = torch.tensor([group.prompt_ids], device=self._device).repeat(group.num_samples, 1)
        shared = shared_prefill(self.model) if self._shares_prompts else nullcontext()
        with shared, torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            output = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=self._generation
            )
        ends: Any = self._generation.eos_token_id
        return [_up_to_end(row, set(ends)) for row in output[:, ids.shape[1] :].tolist()]


def _load(settings: WorkerSettings) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        settings.model,
        dtype=getattr(torch, settings.dtype),
        attn_implementation=settings.attention,
        trust_remote_code=False,  # a worker has nobody to ask
    )
    return model.requires_grad_(False).eval()


def _up_to_end(token_ids: list[int], ends: set[int]) -> list[int]:
    """The tokens before the first end-of-sequence token, and that token."""
    length = sum(1 for _ in itertools.takewhile(lambda token: token not in ends, token_ids))
    return token_ids[: length + 1]
