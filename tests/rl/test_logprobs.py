"""Completion log-probabilities against a float64 reference that computes every position."""

import pytest
import torch

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
