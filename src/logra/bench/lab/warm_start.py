"""The default model after a little supervised training on a task that it cannot do at first."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logra.rl.default_model import cache_folder, default_model_path
from logra.rl.evaluate import encode_prompt
from logra.rl.tasks import Row, load_task
from logra.sync.durable import locked

NUM_BATCHES, BATCH_SIZE, LR = 16, 16, 1e-4


def warm_start(task: str, task_options: dict[str, Any], *, seed: int) -> Path:
    """The model, taught right answers of problems that are not held out; from the cache folder the second time.

    Args:
        task: name of a reasoning-gym dataset.
        task_options: its keyword arguments.
        seed: of the problems, as a run with this seed draws them: those that it holds out are not shown.

    Returns:
        A folder with model and tokenizer.
    """
    key = f"{Path(__file__).read_text()} {torch.__version__} {task} {sorted(task_options.items())} {seed}"
    folder = cache_folder() / f"warm-start-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            _teach(unfinished, task, task_options, seed=seed)
            unfinished.rename(folder)
    return folder


def _teach(folder: Path, task: str, task_options: dict[str, Any], *, seed: int) -> None:
    """Train with dense AdamW, and save model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model_path())
    rows = load_task(task, options=task_options, num_prompts=BATCH_SIZE, num_steps=NUM_BATCHES, seed=seed).train
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for start in range(0, NUM_BATCHES * BATCH_SIZE, BATCH_SIZE):
        model(**supervised_batch(tokenizer, rows[start : start + BATCH_SIZE])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def supervised_batch(tokenizer: Any, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Prompts followed by their answers and the end token, padded on the right.

    Returns:
        input_ids, attention_mask and labels, int64 [rows, longest]; labels are -100 outside the answers.
    """
    end = tokenizer.eos_token_id
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    answers = [[*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], end] for row in rows]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids, mask, labels = (torch.full((len(rows), width), fill) for fill in (end, 0, -100))
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        length = len(prompt) + len(answer)
        ids[index, :length] = torch.tensor(prompt + answer)
        mask[index, :length] = 1
        labels[index, len(prompt) : length] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
