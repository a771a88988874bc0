"""Completion log-probabilities against a float64 reference that computes every position."""

import pytest
import torch

from logra import chunked_head
from logra.memory import Ledger
from logra.rl.logprobs import completion_log_probs


def reference(model, ids, mask, num_completion_tokens, temperature):
    """log softmax(z / τ) of the whole sequence in float64, then the completion's columns."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits.double()[:, :-1]
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    chosen = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    keep = mask[:, 1:].double()
    return (chosen * keep)[:, -num_completion_tokens:], (entropy * keep)[:, -num_completion_tokens:]


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_matches_the_reference(model, tokenizer, batch_size, temperature):
    torch.manual_seed(1)
    ids = torch.randint(2, len(tokenizer), (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # prompt padded on the left
    mask[1, -1:] = 0  # completion padded on the right
    found, entropy = completion_log_probs(
        model, ids, mask, num_completion_tokens=4, temperature=temperature, batch_size=batch_size, with_entropy=True
    )
    expected, expected_entropy = reference(model, ids, mask, 4, temperature)
    # fp32 forward against fp32 forward in another shape: rounding only. Catches an off-by-one of the logits kept.
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-5, rtol=0)


def test_entropy_has_a_graph_only_on_request(model):
    ids, mask = torch.ones(1, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.long)
    for wanted in (False, True):
        log_probs, entropy = completion_log_probs(
            model, ids, mask, num_completion_tokens=2, temperature=1.0, with_entropy=True, entropy_has_grad=wanted
        )
        assert log_probs.requires_grad
        assert entropy is not None
        assert entropy.requires_grad == wanted


@pytest.fixture
def small_chunks(monkeypatch, model):
    """Chunks of three tokens, so that a tiny batch takes several."""
    monkeypatch.setattr(chunked_head, "CHUNK_BYTES", 3 * 4 * model.config.vocab_size)


def scored(model, tokenizer, *, backbone, share_prompts=False, entropy_has_grad=False):
    """Log-probs, entropy and the gradients of a loss of both."""
    torch.manual_seed(1)
    ids = torch.randint(2, len(tokenizer), (4, 9))
    ids[1, :5] = ids[0, :5]
    mask = torch.ones_like(ids)
    mask[1, -1:] = 0
    log_probs, entropy = completion_log_probs(
        model, ids, mask, num_completion_tokens=4, temperature=0.7, with_entropy=True,
        entropy_has_grad=entropy_has_grad, share_prompts=share_prompts, backbone=backbone,
    )  # fmt: skip
    model.zero_grad()
    (log_probs.square().sum() + (entropy.sum() if entropy_has_grad else 0)).backward()
    return log_probs, entropy, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("entropy_has_grad", [False, True])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_chunks_change_nothing(model, tokenizer, small_chunks, share_prompts, entropy_has_grad):
    """Values and gradients (of the head too) are those of the whole logits, up to rounding."""
    options = {"share_prompts": share_prompts, "entropy_has_grad": entropy_has_grad}
    whole = scored(model, tokenizer, backbone=None, **options)
    chunked = scored(model, tokenizer, backbone=model.base_model, **options)
    for found, expected in zip(chunked[:2], whole[:2], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    for found, expected in zip(chunked[2], whole[2], strict=True):
        # fp32 sums in another order; a chunk that was lost or shifted would change the gradient by a tenth and more
        assert (found - expected).norm() < 1e-4 * expected.norm()
    assert "forward" not in vars(model.base_model)


def test_no_tensor_of_all_tokens_and_the_vocabulary(model, tokenizer, small_chunks):
    """Fails if the logits of more than a chunk are ever alive together with those of another."""
    one_chunk = 3 * 4 * model.config.vocab_size
    peaks = {}
    for name, backbone in (("whole", None), ("chunked", model.base_model)):
        with Ledger(model) as ledger:
            scored(model, tokenizer, backbone=backbone)
            ledger.settle()
        phases = ledger.report().phases
        peaks[name] = max(phase.at_peak["logits"] for phase in phases.values())
    # Scaled logits, log-softmax and its gradient of one chunk, and the placeholder position that the head runs on.
    assert peaks["chunked"] <= 5 * one_chunk < 16 * 4 * model.config.vocab_size <= peaks["whole"]


def test_few_logits_are_made_at_once(model, tokenizer):
    """The default run's logits are below the threshold: its numbers and its speed stay what they were."""
    whole = scored(model, tokenizer, backbone=None)
    same = scored(model, tokenizer, backbone=model.base_model)
    assert all(torch.equal(a, b) for a, b in zip(whole[2], same[2], strict=True))
