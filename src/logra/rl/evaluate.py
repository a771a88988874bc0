"""Held-out score: the mean reward of greedy completions, generated in batches."""

import asyncio
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from logra import distributed
from logra.rl.rewards import checked
from logra.rl.tasks import Row, Task

BATCH_SIZE = 64
"""Completions generated at once."""


@torch.no_grad()
def heldout_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    max_new_tokens: int,
    on_bad: Callable[[int], None] | None = None,
) -> float | None:
    """Mean reward of one greedy completion per held-out problem; None without held-out problems, or without a reward.

    Several processes share the problems; all of them call this and have the same score.

    Args:
        model: the policy; its training mode is restored.
        tokenizer: its tokenizer, with a pad token.
        task: problems and reward.
        max_new_tokens: longest completion, tokens.
        on_bad: leaves out the rewards that are NaN or infinite, and is told how many there were, where there were any;
            None makes them an error. Alike on all processes.

    Raises:
        DataError: the reward function failed, or returned something that is no reward.
    """
    if not task.heldout:
        return None
    was_training = model.training
    model.eval()
    rewards: list[float] = []
    own = task.heldout[distributed.rank() :: distributed.num_processes()]
    for start in range(0, len(own), BATCH_SIZE):
        rows = own[start : start + BATCH_SIZE]
        ids, completions = generate_greedy(model, tokenizer, rows, max_new_tokens=max_new_tokens)
        values = score_completions(task, rows, ids, completions, keep_bad=on_bad is not None)
        rewards += [value for value in values if value is not None]
    model.train(was_training)
    if on_bad is not None:
        num_bad = sum(distributed.gathered(sum(map(math.isinf, rewards))))
        rewards = [value for value in rewards if math.isfinite(value)]
        if num_bad:
            on_bad(num_bad)
    score = distributed.mean(math.fsum(rewards) / len(rewards) if rewards else math.nan, weight=len(rewards))
    return None if math.isnan(score) else score


def score_completions(
    task: Task, rows: list[Row], ids: list[list[int]], completions: list[Any], *, keep_bad: bool = False
) -> list[float | None]:
    """Rewards of completions, called as TRL calls a reward function; `keep_bad` makes the bad ones infinity."""
    columns = {name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"}
    reward = checked(task.reward, getattr(task.reward, "__name__", "reward"), keep_bad=keep_bad)
    values = reward(
        prompts=[row["prompt"] for row in rows],
        completions=completions,
        completion_ids=ids,
        trainer_state=None,
        log_extra=lambda *_: None,
        log_metric=lambda *_: None,
        **columns,
    )
    return asyncio.run(_wait_for(values)) if inspect.isawaitable(values) else values


async def _wait_for(values: Any) -> Any:
    return await values


def generate_greedy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], *, max_new_tokens: int
) -> tuple[list[list[int]], list[Any]]:
    """Greedy completions of a batch.

    Returns:
        Token ids up to and without the end-of-sequence token, and TRL's form of the completions: text for a text
        prompt, one assistant message for a conversation.
    """
    encoded = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    width = max(len(ids) for ids in encoded)
    pad: Any = tokenizer.pad_token_id
    ends = _end_tokens(model, tokenizer)
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad, eos_token_id=ends)
    generate: Any = model.generate
    output = generate(
        input_ids=torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded], device=model.device),
        attention_mask=torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded], device=model.device
        ),
        generation_config=config,
    )
    ids = [list(itertools.takewhile(lambda token: token not in ends, row)) for row in output[:, width:].tolist()]
    texts: Any = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return ids, [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's, and those that the model declares."""
    config: Any = model.generation_config
    declared = config.eos_token_id if config is not None else None
    own: Any = tokenizer.eos_token_id
    ends = {own, *(declared if isinstance(declared, list) else [declared])}
    return sorted(end for end in ends if end is not None)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Any) -> list[int]:
    """Token ids of a text prompt, or of a conversation through the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    encoded: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    return encoded["input_ids"]
