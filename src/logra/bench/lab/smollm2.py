"""The default model and task of `logra train` in the lab's loop: SmolLM2-135M-Instruct on sums of two digits."""

from typing import Any

import torch

from logra.bench.lab.sampling import Rollout, sample
from logra.diagnostics import unrelated_texts
from logra.rl.default_model import default_model_path
from logra.rl.evaluate import encode_prompt, score_completions
from logra.rl.tasks import Task, load_task
from logra.trust import TrustRegion
from logra.trust.probe import Probe

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS = 8, 8, 12
UNRELATED_TOKENS = 24
"""Tokens of each unrelated text that count."""


class DefaultTask:
    """Model, tokenizer and problems of one seed."""

    def __init__(self, seed: int, num_steps: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = str(default_model_path())
        self.seed = seed
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        # One step more than is trained on: the last step is measured on a rollout of its own.
        self.task: Task = load_task("chain_sum", num_prompts=NUM_PROMPTS, num_steps=num_steps + 1, seed=seed)

    def roll_out(self, model: Any, step: int) -> Rollout:
        """The problems of this step, drawn from the training set, and completions of the model."""
        generator = torch.Generator().manual_seed(100_003 * self.seed + step)
        chosen = torch.randperm(len(self.task.train), generator=generator)[:NUM_PROMPTS].tolist()
        rows = [self.task.train[index] for index in chosen]
        end = self.tokenizer.eos_token_id
        ids, mask, generated = sample(
            model, [encode_prompt(self.tokenizer, row["prompt"]) for row in rows], num_samples=NUM_SAMPLES,
            max_new_tokens=MAX_NEW_TOKENS, end_id=end, temperature=1.0, generator=generator,
        )  # fmt: skip
        width = generated.shape[1]
        answers = [
            [token for token, flag in zip(row[-width:], flags, strict=True) if flag and token != end]
            for row, flags in zip(ids.tolist(), generated.tolist(), strict=True)
        ]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        repeated = [row for row in rows for _ in range(NUM_SAMPLES)]
        rewards = score_completions(self.task, repeated, answers, completions)
        return Rollout(ids, mask, generated, torch.tensor(rewards), NUM_SAMPLES)

    def unrelated_text(self) -> Probe:
        """`unrelated_text` in this model's tokens."""
        return unrelated_text(self.tokenizer)


def unrelated_text(tokenizer: Any) -> Probe:
    """The texts that come with the diagnostics; every token but the first counts."""
    rows = [tokenizer(text)["input_ids"][:UNRELATED_TOKENS] for text in unrelated_texts()]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    loss_mask = mask.clone()
    loss_mask[:, 0] = 0
    return TrustRegion(min_responses=len(rows), min_tokens=1).make_probe(
        input_ids=ids, attention_mask=mask, loss_mask=loss_mask, temperature=1.0
    )
