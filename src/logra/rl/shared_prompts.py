"""Run a prompt once for all completions that share it.

GRPO draws several completions per prompt, and a rollout or a loss over them would run the same prompt tokens once per
completion. Here the keys and values of each distinct prompt are computed once and handed to all of its completions; the
gradient of every completion flows back into them. The result is the same up to fp32 rounding, at the price of the
distinct prompts and the completions alone: with 8 completions of 12 tokens to a prompt of 25, at 43 % of the tokens.

Applies to models that keep plain keys and values in every layer. Shapes: B sequences, U distinct prompts, P prompt and
C completion tokens.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from logra.errors import ConfigError
from logra.trust.shared_prefix import keeps_plain_keys


def can_share_prompts(model: Any) -> bool:
    """Whether every layer of the model keeps plain keys and values, which can be handed to other rows."""
    takes_cache = {"cache", "logits_to_keep"} <= inspect.signature(type(model).forward).parameters.keys()
    return takes_cache and keeps_plain_keys(model)


_OWN_PREFILL = (
    "cache_implementation",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "prefill_chunk_size",
)
"""Settings of generations that build a cache of their own, or read the prompt in another way."""


def continues_prefill(*configs: GenerationConfig) -> bool:
    """Whether generation is plain sampling with a growing cache, so that it continues one that is handed to it.

    Args:
        configs: all that take part; a setting counts in each of them.
    """
    return all(
        getattr(config, "use_cache", None) in (None, True)
        and getattr(config, "num_beams", None) in (None, 1)
        and all(getattr(config, name, None) is None for name in _OWN_PREFILL)
        for config in configs
    )


def distinct_rows(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that stand for all equal ones.

    Args:
        ids: int64 [B, tokens].
        mask: int64 [B, tokens].

    Returns:
        int64 [U], the first row of each kind; int64 [B], the kind of each row.
    """
    _, kind = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    num_kinds = int(kind.max()) + 1
    position = torch.arange(len(kind), device=kind.device)
    first = torch.full((num_kinds,), len(kind), device=kind.device).scatter_reduce(0, kind, position, "amin")
    return first, kind


def fill_cache(model: Any, ids: Tensor, mask: Tensor, **inputs: Tensor) -> DynamicCache | None:
    """Keys and values of all rows, each distinct row computed once; None where no two rows are equal.

    Args:
        model: a model that `can_share_prompts`.
        ids: int64 [B, tokens], tokens >= 1.
        mask: int64 [B, tokens].
        inputs: further inputs of the model, [B, tokens] each.

    Raises:
        ConfigError: the model did not keep them, so that completions would be read without their prompt.
    """
    first, kind = distinct_rows(ids, mask)
    if len(first) == len(ids):
        return None
    cache = DynamicCache(config=model.config)
    selected = {name: value[first] for name, value in inputs.items()}
    model(input_ids=ids[first], attention_mask=mask[first], cache=cache, use_cache=True, logits_to_keep=1, **selected)
    if cache.get_seq_length() != ids.shape[1]:
        raise ConfigError(
            f"the model kept keys and values of {cache.get_seq_length()} of {ids.shape[1]} prompt tokens: activation "
            f"(gradient) checkpointing drops them. Switch it on with the argument of GRPOConfig, or off"
        )
    cache.batch_select_indices(kind)
    return cache


@contextmanager
def shared_prefill(model: Any) -> Iterator[None]:
    """Let `model.generate(input_ids=..., attention_mask=...)` run equal prompts once, inside the context."""
    generate = model.generate

    def generate_shared(*, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        # The last prompt token stays out: its logits are what generation starts from.
        ids, mask = input_ids[:, :-1], attention_mask[:, :-1]
        if ids.shape[1] > 0:
            # Positions as generation counts them, without padding.
            positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
            cache = fill_cache(model, ids, mask, position_ids=positions)
            options |= {} if cache is None else {"cache": cache}
        return generate(input_ids=input_ids, attention_mask=attention_mask, **options)

    model.generate = generate_shared
    try:
        yield
    finally:
        del model.generate


def order_by_prompt(batches: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The rows of TRL's micro-batches, dealt again so that completions of one prompt come together.

    Only for micro-batches that are accumulated into one gradient, whose order makes no difference to it.

    Args:
        batches: micro-batches of equal size, see `rl.grpo`.

    Returns:
        As many micro-batches.
    """
    from trl.trainer.utils import split_tensor_dict  # here: rollout workers use this module and do without TRL

    if any(not isinstance(value, Tensor) for batch in batches for value in batch.values()):
        return list(batches)  # images and the like: not worth the bookkeeping
    joined = {
        name: torch.cat([batch[name] for batch in batches]) if first.dim() else first
        for name, first in batches[0].items()
    }
    _, kind = distinct_rows(joined["prompt_ids"], joined["prompt_mask"])
    order = torch.argsort(kind, stable=True)
    ordered = {name: value[order] if value.dim() else value for name, value in joined.items()}
    return split_tensor_dict(ordered, len(batches))
