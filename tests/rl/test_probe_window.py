"""The probe tensors of an accumulation window: masks by position, whatever the ids are."""

import math

import pytest
import torch

from logra.rl.probe_window import ProbeWindow, TimedTrust
from logra.trust import TrustRegion

PAD = 1  # also the end-of-sequence token


def batch(prompts, completions, advantages=None, **fields):
    """A micro-batch in TRL's form: prompts padded on the left, completions on the right, with PAD."""

    def pad(rows, left):
        width = max(map(len, rows))
        ids = [[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows]
        mask = [[0] * (width - len(r)) + [1] * len(r) if left else [1] * len(r) + [0] * (width - len(r)) for r in rows]
        return torch.tensor(ids), torch.tensor(mask)

    prompt_ids, prompt_mask = pad(prompts, left=True)
    completion_ids, completion_mask = pad(completions, left=False)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(advantages or [0.0] * len(prompts)),
        **fields,
    }


def test_a_generated_end_token_counts_and_padding_does_not():
    # Catches a mask derived from ids: the generated PAD in the first row must count, the padding must not.
    window = ProbeWindow()
    window.add(batch([[5, PAD, 6], [7]], [[8, PAD], [9, 8, 7]]))
    tensors = window.tensors()
    assert tensors["input_ids"].tolist() == [[5, PAD, 6, 8, PAD, PAD], [PAD, PAD, 7, 9, 8, 7]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert tensors["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]]


def test_micro_batches_of_different_widths_are_joined():
    window = ProbeWindow()
    window.add(batch([[5, 6]], [[7]]))
    window.add(batch([[5]], [[8, 9]]))
    tensors = window.tensors()
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert tensors["loss_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    TrustRegion().make_probe(**tensors, temperature=1.0)  # refuses tensors that contradict each other


def test_tool_results_are_not_generated():
    window = ProbeWindow()
    window.add(batch([[5]], [[7, 8, 9]], tool_mask=torch.tensor([[1, 0, 1]])))
    assert window.tensors()["loss_mask"].tolist() == [[0, 1, 0, 1]]
    assert window.tensors()["attention_mask"].tolist() == [[1, 1, 1, 1]]


def test_advantage_and_clearing():
    window = ProbeWindow()
    window.add(batch([[5]], [[7]]))
    assert not window.has_advantage()
    window.add(batch([[5]], [[7]], [0.5]))
    assert window.has_advantage()
    window.clear()
    assert not window.has_advantage()


def test_mismatch_is_the_mean_over_generated_tokens_that_the_engine_scored():
    rollout = torch.tensor([[-1.0, -2.0, 100.0], [-3.0, math.nan, 100.0]])
    trainer = torch.tensor([[-1.5, -2.1, -100.0], [-3.4, -1.0, -100.0]])
    fields = {"sampling_per_token_logps": rollout, "old_per_token_logps": trainer}
    window = ProbeWindow()
    window.add(batch([[5], [5]], [[7, 8], [7, 8]], **{k: v[:, :2] for k, v in fields.items()}))
    # (0.5 + 0.1 + 0.4) / 3; the NaN is left out.
    assert window.mismatch(None) == pytest.approx(1.0 / 3, abs=1e-6)
    assert window.mismatch(0.0) == pytest.approx(0.3 / 3, abs=1e-6)
    window.add(batch([[5]], [[7, 8]]))
    assert window.mismatch(0.25) == 0.25  # TRL's own generation reports nothing


def test_log_probabilities_that_are_not_finite_do_not_end_the_run():
    # The gradient is not finite either, so the optimizer skips the step; an error on one process would hang the others.
    fields = {
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0]]),
        "old_per_token_logps": torch.tensor([[math.nan, -2.5]]),
    }
    window = ProbeWindow()
    window.add(batch([[5]], [[7, 8]], **fields))
    assert window.mismatch(None) == pytest.approx(0.5)
    window.clear()
    window.add(batch([[5]], [[7, 8]], **fields | {"old_per_token_logps": torch.tensor([[math.nan, -math.inf]])}))
    assert window.mismatch(0.25) == 0.25


def test_timed_trust_counts_seconds_and_passes_everything_on():
    class Policy:
        def predict(self, model, probe, deltas, *, step, mismatch):
            return (model, probe, deltas, step, mismatch)

        def verify(self, model, probe, deltas, *, budget, attempt):
            return (model, probe, deltas, budget, attempt)

    timed = TimedTrust(Policy())  # type: ignore[arg-type]
    assert timed.predict("m", "p", {}, step=3, mismatch=0.5) == ("m", "p", {}, 3, 0.5)  # type: ignore[arg-type]
    assert timed.verify("m", "p", {}, budget=0.1, attempt=2) == ("m", "p", {}, 0.1, 2)  # type: ignore[arg-type]
    assert timed.seconds > 0
    timed.reset()
    assert timed.seconds == 0
