"""A long probe fits where a training micro-batch of the same length fits."""

import torch
import transformers

from logra.contracts import Delta
from logra.memory import Ledger
from logra.trust import TrustRegion
from logra.trust.measure import predicted_kl, realised_kl

NUM_TOKENS = 4096


def peak_bytes(model, run) -> int:
    with Ledger(model) as ledger:
        run()
        ledger.settle()
    return ledger.report().peak_bytes


def test_a_probe_of_4096_tokens_needs_less_memory_than_a_training_micro_batch():
    """One sequence of 4,096 tokens, forward and backward, against prediction and check on the same sequence.

    Catches attention scores [heads, 4096, 4096] that exist in full, logits of all tokens with their tangents, and
    activations of earlier layers that are held.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=NUM_TOKENS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(3, 8192, (1, NUM_TOKENS))
    mask = torch.ones_like(ids)
    generated = mask.clone()
    generated[:, 0] = 0
    probe = TrustRegion(min_responses=1).make_probe(
        input_ids=ids, attention_mask=mask, loss_mask=generated, temperature=1.0
    )
    deltas = {
        module: Delta(1e-3 * torch.randn(module.out_features, 4), torch.randn(4, module.in_features))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    training = peak_bytes(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    model.zero_grad()
    assert peak_bytes(model, lambda: predicted_kl(model, probe, deltas)) < training
    assert peak_bytes(model, lambda: realised_kl(model, probe, deltas)) < training
