"""How accelerate spreads a language model over FSDP2 processes: the groups of parameters that are gathered together.

    every decoder layer         gathered for its forward, and again for its backward
    input embedding             the same
    final norm and head         gathered at the end of forward, freed in backward; with the embedding where it is tied
    what remains                the root: gathered throughout

`logra.rl.fsdp.shard` lets accelerate do it; a test compares the groups. This does it without accelerate's state.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from logra.planner.layers import decoder_layers


def shard(model: Any, mesh: DeviceMesh, param_dtype: torch.dtype | None = None) -> None:
    """Shard a causal language model of transformers in place.

    Args:
        model: it, or PEFT's wrapper of it.
        mesh: one dimension.
        param_dtype: that weights are gathered in; None for their own.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype)}
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    last = [module for module in (_final_norm(model), head) if module is not None]
    if head is not None and embedding.weight is head.weight:
        last.insert(1, embedding)
    else:
        fully_shard(embedding, **options)
    fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, **options)


def _final_norm(model: Any) -> nn.Module | None:
    """The last normalisation among the direct children of the backbone, by the name of its class."""
    backbone = getattr(model, model.base_model_prefix, None)
    children = backbone.children() if isinstance(backbone, nn.Module) else ()
    return next((child for child in reversed(list(children)) if "Norm" in type(child).__name__), None)
