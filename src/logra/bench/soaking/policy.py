"""A two-layer transformer over characters, taught just enough of its task by imitation for rewards to differ."""

import random
import string
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from logra.bench.soaking import task

END = "<end>"
MAX_ANSWER = 4
"""Tokens of the longest answer, the end included: 999 and 81 fit."""


def save_policy(folder: Path, *, num_steps: int, seed: int = 0) -> None:
    """Build, warm up and save the policy as a Hugging Face folder.

    Args:
        folder: where to.
        num_steps: batches of imitation.
        seed: of weights and batches.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["<unk>", END, *string.digits, "+", "*", "="]
    words: Any = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token=END, pad_token=END)
    torch.manual_seed(seed)
    build: Any = LlamaConfig
    config = build(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, eos_token_id=1, pad_token_id=1, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    _imitate(model, tokenizer, num_steps, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _imitate(model: Any, tokenizer: Any, num_steps: int, seed: int) -> None:
    """Next-token prediction of problems with their answers; the loss is on the answers."""
    draw = random.Random(seed)
    problems = task.dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        rows = draw.choices(problems, k=128)
        sequences = [tokenizer(row["prompt"] + row["answer"])["input_ids"] + [1] for row in rows]
        width = max(map(len, sequences))
        ids = torch.tensor([ids + [1] * (width - len(ids)) for ids in sequences])
        labels = torch.full_like(ids, -100)
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            start = len(row["prompt"])
            labels[index, start : len(sequence)] = ids[index, start : len(sequence)]
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
