"""A policy-gradient step of a toy model, in one piece and in micro-batches."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import logra

TARGETS = ("q_proj", "k_proj", "o_proj")


def make_batch(seed: int = 2) -> dict[str, torch.Tensor]:
    """Four responses of 7 tokens after 3 of prompt, and an advantage for each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 23, (4, 10), generator=generator)
    loss_mask = torch.zeros_like(ids)
    loss_mask[:, 3:] = 1
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": loss_mask,
        "advantages": torch.tensor([1.5, -0.5, 0.25, -1.0]),
    }


def loss(model: nn.Module, batch: dict[str, torch.Tensor], rows: slice = slice(None)) -> torch.Tensor:
    """-(mean over the four responses of the sum of A log p(token)), of some of the rows: micro-batches add up."""
    ids = batch["input_ids"][rows]
    logits = model(ids)
    log_p = torch.log_softmax(logits[:, 2:-1], dim=-1).gather(-1, ids[:, 3:, None])[..., 0]
    return -(log_p.sum(-1) * batch["advantages"][rows].to(log_p.dtype)).sum() / 4


def make_optimizer(model: nn.Module, **settings) -> logra.SketchOptimizer:
    return logra.SketchOptimizer(model, **({"lr": 1e-3, "rank": 4, "target_modules": TARGETS} | settings))


@pytest.fixture
def rl() -> SimpleNamespace:
    """The helpers of this file (test modules cannot import it)."""
    return SimpleNamespace(batch=make_batch, loss=loss, optimizer=make_optimizer)
