"""Log-probabilities and entropy of completion tokens, without logits of the prompt.

Shapes: B sequences of P prompt tokens and C completion tokens, V the vocabulary.
"""

import torch
from torch import Tensor, nn

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

    Returns:
        log-probabilities fp32 [B, C]; entropy fp32 [B, C] in nats, or None. Both are 0 on padding.
    """
    log_probs: list[Tensor] = []
    entropies: list[Tensor] = []
    step = batch_size or len(input_ids)
    for start in range(0, len(input_ids), step):
        ids, mask = input_ids[start : start + step], attention_mask[start : start + step]
        logits = _completion_logits(model, ids, mask, num_completion_tokens, share_prompts)
        log_p = torch.log_softmax(logits.float() / temperature, dim=-1)  # [B, C, V]
        padding = mask[:, -num_completion_tokens:] == 0
        chosen = ids[:, -num_completion_tokens:, None]
        log_probs.append(log_p.gather(-1, chosen).squeeze(-1).masked_fill(padding, 0.0))
        if with_entropy:
            with torch.set_grad_enabled(entropy_has_grad and torch.is_grad_enabled()):
                entropies.append(-(log_p.exp() * log_p).sum(dim=-1).masked_fill(padding, 0.0))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def _completion_logits(model: nn.Module, ids: Tensor, mask: Tensor, num_tokens: int, share_prompts: bool) -> Tensor:
    """Logits that predict the last `num_tokens` tokens, [B, num_tokens, V]."""
    # The one before the completion predicts its first token; the last position predicts a token beyond the sequence.
    inputs = {"attention_mask": mask, "logits_to_keep": num_tokens + 1}
    num_shared = ids.shape[1] - num_tokens - 1
    cache = None
    if share_prompts and num_shared > 0:
        cache = fill_cache(model, ids[:, :num_shared], mask[:, :num_shared])
    if cache is None:
        output = model(input_ids=ids, use_cache=False, **inputs)
    else:
        output = model(input_ids=ids[:, num_shared:], cache=cache, use_cache=True, **inputs)
    return output.logits[:, :-1]
