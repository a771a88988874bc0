"""Sampling and log-probabilities of a causal model on token ids, each prompt run once for all its completions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from logra.rl.logprobs import completion_log_probs


@dataclass(frozen=True)
class Rollout:
    """Completions of a batch of prompts. B completions, P prompt and C completion columns.

    Attributes:
        input_ids: int64 [B, P + C], prompts padded on the left, completions on the right.
        attention_mask: int64 [B, P + C].
        generated: int64 [B, C], 1 at sampled tokens, the end of the sequence included.
        rewards: fp32 [B].
        num_samples: completions of each prompt, which are neighbours.
    """

    input_ids: Tensor
    attention_mask: Tensor
    generated: Tensor
    rewards: Tensor
    num_samples: int

    def advantages(self) -> Tensor:
        """(reward - mean) / (standard deviation + 1e-4) in each group, fp32 [B]; 0 where all rewards are equal."""
        groups = self.rewards.view(-1, self.num_samples)
        centred = groups - groups.mean(dim=1, keepdim=True)
        return (centred / (groups.std(dim=1, keepdim=True, correction=0) + 1e-4)).flatten()

    def left_out_rewards(self) -> Tensor:
        """Reward less the mean of the others of its group, fp32 [B]: a baseline that does not depend on the sample."""
        groups = self.rewards.view(-1, self.num_samples)
        others = (groups.sum(dim=1, keepdim=True) - groups) / (self.num_samples - 1)
        return (groups - others).flatten()

    def probe(self, temperature: float) -> dict[str, Any]:
        """The tensors that a trust region takes."""
        loss_mask = torch.zeros_like(self.input_ids)
        loss_mask[:, -self.generated.shape[1] :] = self.generated
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "loss_mask": loss_mask,
            "temperature": temperature,
        }


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], *, num_samples: int, max_new_tokens: int, end_id: int,
    temperature: float, generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Draw completions.

    Returns:
        input_ids [B, P + C], attention_mask [B, P + C], generated [B, C]; see `Rollout`.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[end_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True,
                   logits_to_keep=1)  # fmt: skip
    cache.batch_repeat_interleave(num_samples)
    ids, mask = ids.repeat_interleave(num_samples, 0), mask.repeat_interleave(num_samples, 0)
    logits = output.logits[:, -1].repeat_interleave(num_samples, 0)
    alive = torch.ones(len(ids), dtype=torch.bool)
    for step in range(max_new_tokens):
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        ids = torch.cat([ids, chosen.where(alive, end_id)[:, None]], dim=1)
        mask = torch.cat([mask, alive[:, None].long()], dim=1)
        alive = alive & (chosen != end_id)
        if step + 1 == max_new_tokens or not alive.any():
            break
        position = (mask.sum(1, keepdim=True) - 1).clamp_min(0)
        output = model(input_ids=ids[:, -1:], attention_mask=mask, position_ids=position, cache=cache, use_cache=True)
        logits = output.logits[:, -1]
    return ids, mask, mask[:, width:]


def log_probs(model: Any, rollout: Rollout, rows: slice, temperature: float) -> Tensor:
    """log p of each sampled token of some completions, fp32 [rows, C], 0 elsewhere."""
    values, _ = completion_log_probs(
        model,
        rollout.input_ids[rows],
        rollout.attention_mask[rows],
        num_completion_tokens=rollout.generated.shape[1],
        temperature=temperature,
        share_prompts=True,
    )
    return values * rollout.generated[rows]
