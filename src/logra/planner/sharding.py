"""What one of several processes has: of the weights by FSDP2, of recovered gradients and moments by their owners.

accelerate spreads a language model over FSDP2 processes by these groups of parameters that are gathered together:

    every decoder layer         gathered for its forward, and again for its backward
    input embedding             gathered for its forward; its backward takes no weight
    final norm and head         gathered at the end of forward, freed in backward; with the embedding where it is tied
    what remains                the root: gathered throughout

`logra.rl.fsdp.shard` lets accelerate do it; a test compares the groups. This does it without accelerate's state.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from logra.planner.layers import decoder_layers
from logra.sketch.targets import Target


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
        embedding.set_unshard_in_backward(False)
    fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, **options)


def owners_by_layer(targets: Sequence[Target], num_processes: int) -> dict[str, int]:
    """Owners in the place of `logra.optim.ownership.owners` that are the same in every layer, so that layers are alike.

    Process 0, which is traced, has of each layer the targets that come closest to its share, and no less; 1 has the rest.
    """
    layers: dict[str, list[Target]] = {}
    for target in targets:
        place = re.match(r".*?\.\d+\.", target.fqn)
        layers.setdefault(place[0] if place else "", []).append(target)
    first: set[str] = set()
    for members in layers.values():
        sums: dict[int, tuple[str, ...]] = {0: ()}
        for target in members:
            size = target.out_features + target.in_features
            sums |= {total + size: (*names, target.fqn) for total, names in sums.items() if total + size not in sums}
        first |= set(sums[min(total for total in sums if total * num_processes >= max(sums))])
    return {target.fqn: int(target.fqn not in first) for target in targets}


def _final_norm(model: Any) -> nn.Module | None:
    """The last normalisation among the direct children of the backbone, by the name of its class."""
    backbone = getattr(model, model.base_model_prefix, None)
    children = backbone.children() if isinstance(backbone, nn.Module) else ()
    return next((child for child in reversed(list(children)) if "Norm" in type(child).__name__), None)
