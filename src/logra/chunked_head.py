"""Log-probabilities and entropy of chosen tokens, with logits of a few tokens at a time.

    log p(token) = z_token / τ - logsumexp(z / τ),        z = head(hidden)  [chunk, vocabulary]

The backbone runs once. The head runs on one chunk of its hidden states after the other, and again in backward, so that no
[tokens, vocabulary] tensor exists: the most is a few of [chunk, vocabulary]. The head is the model's own, scaling and soft
caps included: it is called through the model, whose backbone hands the chosen hidden states over.

Contract: the result equals that of the whole logits up to rounding. Refuses, with `LograError`, a backbone without
`last_hidden_state`, and under FSDP2 a trained weight that embedding and head share: FSDP2 frees the group of both after the
first chunk's backward, and the gradients of the others are lost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from logra.errors import LograError
from logra.shards import gathered_again, is_fsdp

CHUNK_BYTES = 2**27
"""Of fp32 logits of one chunk (128 MiB)."""

_WHOLE_CHUNKS = 2
"""Up to so many chunks of logits are made at once: less memory than the second pass through the head is worth."""


def scores(logits: Tensor, chosen: Tensor, temperature: float, *, entropy_has_grad: bool) -> tuple[Tensor, Tensor]:
    """log softmax(z / τ) of the chosen tokens, and the entropy of the distribution.

    Args:
        logits: [..., vocabulary], any floating dtype.
        chosen: int64 [...].
        temperature: τ.
        entropy_has_grad: keep the graph of the entropy.

    Returns:
        fp32 [...], and fp32 [...] in nats.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_has_grad and torch.is_grad_enabled()):
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(-1, chosen[..., None]).squeeze(-1), entropy


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose fp32 logits take at most `CHUNK_BYTES`."""
    return max(CHUNK_BYTES // (4 * vocabulary), 1)


def needs_chunks(num_tokens: int, vocabulary: int) -> bool:
    """Whether the logits of so many tokens are made chunk by chunk, where the head allows it, instead of at once."""
    return num_tokens > _WHOLE_CHUNKS * chunk_tokens(vocabulary)


def trains_shared_weight(model: Any) -> bool:
    """Whether the head of a language model is its embedding, and trains."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and embedding.weight is head.weight and head.weight.requires_grad


def chunked_scores(
    model: Any,
    backbone: Any,
    inputs: dict[str, Any],
    chosen: Tensor,
    *,
    chunk: int,
    temperature: float,
    entropy_has_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """`scores` of the last C tokens of every sequence.

    Args:
        model: a causal language model of transformers, or a wrapper that calls it.
        backbone: the module inside whose output the head reads (`PreTrainedModel.base_model`).
        inputs: keyword arguments of the model's forward over the sequences, `input_ids` [B, tokens] among them.
        chosen: int64 [B, C], the last C of the tokens.
        chunk: tokens per call of the head.
        temperature: τ.
        entropy_has_grad: keep the graph of the entropy.

    Returns:
        log-probabilities fp32 [B, C] and entropy fp32 [B, C] in nats.

    Raises:
        LograError: see the module docstring.
    """
    if is_fsdp(model) and trains_shared_weight(model):
        raise LograError(
            f"the head of {type(model).__name__} is its embedding, which trains and is sharded by FSDP2: its gradient cannot "
            f"be taken chunk by chunk. Freeze it, or compute all logits at once"
        )
    num_tokens = chosen.shape[1]
    output = _run_backbone(model, backbone, inputs)
    kind = type(output)
    # The last position predicts a token beyond the sequence.
    hidden = output.last_hidden_state[:, -num_tokens - 1 : -1].flatten(0, 1)
    gathered_again(hidden, model)
    del output
    ids = chosen.flatten()
    placeholder = inputs["input_ids"][:1, :1]

    def of_chunk(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        with forward_replaced(backbone, lambda *args, **kwargs: kind(last_hidden_state=hidden[None])):
            logits = model(input_ids=placeholder, use_cache=False).logits[0]
        return scores(logits, ids, temperature, entropy_has_grad=entropy_has_grad)

    parts = [
        checkpoint(of_chunk, hidden[start : start + chunk], ids[start : start + chunk], use_reentrant=False,
                   preserve_rng_state=False)
        for start in range(0, len(ids), chunk)
    ]  # fmt: skip
    log_probs, entropy = (torch.cat(column).view(chosen.shape) for column in zip(*parts, strict=True))
    return log_probs, entropy


def _run_backbone(model: Any, backbone: Any, inputs: dict[str, Any]) -> Any:
    """The backbone's output. It is called through the model, so that wrappers around it keep their place."""
    original, outputs = backbone.forward, []

    def keep(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            raise LograError(
                f"the backbone {type(backbone).__name__} returned a {type(output).__name__} without `last_hidden_state`: "
                f"set config.return_dict=True"
            )
        outputs.append(output)
        return type(output)(last_hidden_state=hidden[:1, :1])  # the head runs, on one position

    with forward_replaced(backbone, keep):
        model(**inputs)
    return outputs[0]


@contextmanager
def forward_replaced(module: Any, forward: Any) -> Iterator[None]:
    """Set the instance attribute `forward` and put back what was there: an earlier instance attribute, or none."""
    had, before = "forward" in vars(module), vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if had:
            module.forward = before
        else:
            del module.forward
