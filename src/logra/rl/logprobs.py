"""Log-probabilities and entropy of completion tokens, without logits of the prompt, and in chunks where they are many.

Shapes: B sequences of P prompt tokens and C completion tokens, V the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from logra.chunked_head import chunk_tokens, chunked_scores, needs_chunks, scores
from logra.rl.shared_prompts import fill_cache


def completion_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    num_completion_tokens: int,
    temperature: float,
    batch_size: int | None = None,
    with_entropy: bool = False,
    entropy_has_grad: bool = False,
    share_prompts: bool = False,
    backbone: nn.Module | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z / τ) of each completion token, and the entropy of the distribution it was drawn from.

    Args:
        model: a causal language model that takes `logits_to_keep`.
        input_ids: int64 [B, P + C].
        attention_mask: int64 [B, P + C], 0 on padding.
        num_completion_tokens: C, the last columns of `input_ids`.
        temperature: τ.
        batch_size: sequences per forward; None takes all at once.
        with_entropy: also return the entropy.
        entropy_has_grad: keep the graph of the entropy (needed for an entropy bonus only).
        share_prompts: run equal prompts of a forward once, see `shared_prompts`.
        backbone: what the model's head reads. With it, logits that need chunks (`logra.chunked_head`) are made chunk by
            chunk, and again in backward; None makes them all at once.

    Returns:
        log-probabilities fp32 [B, C]; entropy fp32 [B, C] in nats, or None. Both are 0 on padding.
    """
    log_probs: list[Tensor] = []
    entropies: list[Tensor] = []
    step = batch_size or len(input_ids)
    for start in range(0, len(input_ids), step):
        ids, mask = input_ids[start : start + step], attention_mask[start : start + step]
        inputs = _completion_inputs(model, ids, mask, num_completion_tokens, share_prompts)
        chosen = ids[:, -num_completion_tokens:]
        if backbone is None or not needs_chunks(chosen.numel(), vocabulary := _vocabulary(backbone)):
            logits = model(logits_to_keep=num_completion_tokens + 1, **inputs).logits[:, :-1]  # [B, C, V]
            log_p, entropy = scores(logits, chosen, temperature, entropy_has_grad=entropy_has_grad)
            del logits
        else:
            chunk = chunk_tokens(vocabulary)
            log_p, entropy = chunked_scores(
                model, backbone, inputs, chosen, chunk=chunk, temperature=temperature, entropy_has_grad=entropy_has_grad
            )
        padding = mask[:, -num_completion_tokens:] == 0
        log_probs.append(log_p.masked_fill(padding, 0.0))
        entropies.append(entropy.masked_fill(padding, 0.0))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def _completion_inputs(
    model: nn.Module, ids: Tensor, mask: Tensor, num_tokens: int, share_prompts: bool
) -> dict[str, Any]:
    """Inputs of a forward that ends in the completion; shared prompts are in its cache."""
    num_shared = ids.shape[1] - num_tokens - 1
    cache = None
    if share_prompts and num_shared > 0:
        cache = fill_cache(model, ids[:, :num_shared], mask[:, :num_shared])
    if cache is None:
        return {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    # The token before the completion stays: it predicts the first one.
    return {"input_ids": ids[:, num_shared:], "attention_mask": mask, "cache": cache, "use_cache": True}


def _vocabulary(backbone: Any) -> int:
    return int(backbone.get_input_embeddings().weight.shape[0])
