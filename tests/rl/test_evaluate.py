"""Held-out score: greedy completions, independent of batching and padding."""

import math

import pytest
import torch

from logra.errors import DataError
from logra.rl import evaluate
from logra.rl.evaluate import generate_greedy, heldout_score
from logra.rl.tasks import Task


def task_of(rows, reward):
    return Task("t", rows, rows, reward, "accuracy")


ROWS = [{"prompt": [{"role": "user", "content": "1" * n}], "answer": str(n)} for n in (1, 5, 3)] + [
    {"prompt": "plain text", "answer": "x"}
]


def test_greedy_completions_do_not_depend_on_the_batch(model, tokenizer):
    model.eval()
    together, texts = generate_greedy(model, tokenizer, ROWS, max_new_tokens=5)
    for row, ids, text in zip(ROWS, together, texts, strict=True):
        # Catches padding on the wrong side: a padded row would continue its padding.
        alone, alone_text = generate_greedy(model, tokenizer, [row], max_new_tokens=5)
        assert alone == [ids]
        assert alone_text == [text]
    assert texts[0][0]["role"] == "assistant"
    assert isinstance(texts[3], str)


def test_greedy_is_the_argmax(model, tokenizer):
    model.eval()
    (ids,), _ = generate_greedy(model, tokenizer, [ROWS[3]], max_new_tokens=3)
    context = tokenizer("plain text")["input_ids"]
    for token in ids:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context])).logits
        assert token == logits[0, -1].argmax()
        context = [*context, token]


def test_score_is_the_mean_over_batches(model, tokenizer, monkeypatch):
    monkeypatch.setattr(evaluate, "BATCH_SIZE", 3)
    seen = []

    def reward(completions, answer, completion_ids, log_metric, **_):
        seen.append(answer)
        log_metric("a", 1.0)
        assert len(completion_ids) == len(completions)
        return [1.0, None, 0.0][: len(completions)]

    model.train()
    # (1 + 0 + 1) / 3: the completion without a reward does not count, and the second batch has one row.
    assert heldout_score(model, tokenizer, task_of(ROWS, reward), max_new_tokens=2) == pytest.approx(2 / 3)
    assert seen == [["1", "5", "3"], ["x"]]
    assert model.training


def test_bad_rewards_are_left_out_and_counted_where_that_is_asked_for(model, tokenizer):
    def reward(completions, **_):
        return [1.0, math.nan, None, -math.inf]

    found = []
    task = task_of(ROWS, reward)
    assert heldout_score(model, tokenizer, task, max_new_tokens=2, on_bad=found.append) == 1.0
    assert found == [2]
    with pytest.raises(DataError, match="must be finite"):
        heldout_score(model, tokenizer, task, max_new_tokens=2)
    nothing_good = task_of(ROWS, lambda completions, **_: [math.nan] * 4)
    assert heldout_score(model, tokenizer, nothing_good, max_new_tokens=2, on_bad=found.append) is None
    with pytest.raises(DataError, match="returned str"):  # what is no number is an error all the same
        heldout_score(model, tokenizer, task_of(ROWS, lambda **_: "text"), max_new_tokens=2, on_bad=found.append)


def test_async_and_broken_rewards(model, tokenizer):
    async def later(completions, **_):
        return [1.0] * len(completions)

    def broken(completions, **_):
        return [1.0]

    assert heldout_score(model, tokenizer, task_of(ROWS, later), max_new_tokens=2) == 1.0
    with pytest.raises(DataError, match="'broken'"):
        heldout_score(model, tokenizer, task_of(ROWS, broken), max_new_tokens=2)
    assert heldout_score(model, tokenizer, task_of([], later), max_new_tokens=2) is None
