"""Attention that has a forward derivative, for transformers models.

The fused kernels behind "sdpa" and "flash_attention_*" have no forward-mode derivative. While a probe runs, the model is
switched to an attention of our own: the model's *own* eager function (so that grouped queries, scaling, soft caps,
sinks and position biases are the model's), called for one block of queries at a time. An output row depends on its own
query only, so blocks change nothing but the peak memory, which is bounded by `SCORE_ELEMENTS`.

Contract: transformers is imported only where it already is (a model of its classes was passed), and what the model's
configs said is restored in `finally`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import ProbeError

ATTENTION_NAME = "logra_probe"
# Attention scores [batch, heads, queries, keys] of one block: 64 MiB in fp32.
SCORE_ELEMENTS = 1 << 24


def is_transformers_model(module: nn.Module) -> bool:
    """Whether `module` is a transformers `PreTrainedModel`. Never imports transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def blocked_eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The eager attention of the model that `module` belongs to, one block of queries at a time.

    Args:
        module: the attention layer; the module file of its class (or of a base class) defines `eager_attention_forward`.
        query: [batch, heads, queries, head_dim].
        key: [batch, key_heads, keys, head_dim].
        value: [batch, key_heads, keys, head_dim].
        attention_mask: additive, [batch, 1 or heads, queries, keys], or None.
        dropout: ignored; a probe has none.
        **kwargs: what the model passes to its attention function (scaling, softcap, ...). 4-dimensional tensors with one
            row per query, such as position biases, are cut along with the queries.

    Returns:
        Output [batch, queries, heads, head_dim] and None for the attention weights.

    Raises:
        ProbeError: the model has no eager function.
    """
    eager = _eager_function(module)
    batch, heads, num_queries, _ = query.shape
    block = max(1, SCORE_ELEMENTS // (batch * heads * key.shape[2]))

    def rows(tensor: Any, start: int) -> Any:
        per_query = isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.shape[2] == num_queries
        return tensor[:, :, start : start + block] if per_query else tensor

    outputs = []
    for start in range(0, num_queries, block):
        block_kwargs = {name: rows(argument, start) for name, argument in kwargs.items()}
        mask = rows(attention_mask, start)
        outputs.append(eager(module, rows(query, start), key, value, mask, dropout=0.0, **block_kwargs)[0])
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _eager_function(module: nn.Module) -> Any:
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ProbeError(
        f"{type(module).__name__} has no eager attention function to differentiate; use TrustRegion(method='difference')."
    )


@contextmanager
def differentiable_attention(model: nn.Module) -> Iterator[None]:
    """Switch every transformers model inside `model` to `blocked_eager_attention`, and back.

    Models that do not take their attention from transformers' `AttentionInterface` are left as they are: their own code
    either has a forward derivative, or the probe's forward raises.
    """
    configs: dict[int, Any] = {}
    if any(is_transformers_model(module) and _uses_interface(module) for module in model.modules()):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        AttentionInterface.register(ATTENTION_NAME, blocked_eager_attention)
        # Without a mask function of the same name transformers would pass no mask at all to a custom attention.
        AttentionMaskInterface.register(ATTENTION_NAME, eager_mask)
        # Attention layers, backbones and sub-models read the name from their own `config`, which they may share.
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                configs[id(config)] = config
    # The internal attribute, as the public setter would also overwrite the sub-configs.
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation_internal = ATTENTION_NAME
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _uses_interface(module: Any) -> bool:
    return bool(module._can_set_attn_implementation())
