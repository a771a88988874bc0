"""Who owns which storage: parameters, gradients, sketches and optimizer state of a model and its optimizer.

Ownership decides over the category of a tensor wherever it is known, whatever the phase that allocated it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages under a tensor; those of its parts for a wrapper such as DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):
                yield from storages_of(part)
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()


def owned_tensors(
    model: nn.Module | None, optimizer: Any = None, reference_model: nn.Module | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that model, optimizer and reference model hold, with its category.

    Args:
        model: the policy.
        optimizer: a SketchOptimizer, any torch optimizer, or None.
        reference_model: a frozen second copy, or None.
    """
    if model is not None:
        targets = _target_ids(model, optimizer)
        for parameter in model.parameters():
            yield "weights" if id(parameter) in targets else "non_target_parameters", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for buffer in model.buffers():
            yield "non_target_parameters", buffer
    if reference_model is not None:
        for tensor in (*reference_model.parameters(), *reference_model.buffers()):
            yield "reference_model", tensor
    if optimizer is None:
        return
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield "weights" if name == "lo" else "optimizer_state", value
    last_update = getattr(optimizer, "last_update", None)
    if last_update is not None:
        for update in last_update.weights.values():
            yield from (("sync", value) for value in vars(update).values() if isinstance(value, Tensor))
        yield from (("sync", tensor) for tensor in last_update.tensors.values())
    capture = getattr(optimizer, "_capture", None)
    if capture is not None:
        for sketch in capture.sketches().values():
            for tensor in sketch.tensors():
                yield "sketches", tensor


def _target_ids(model: nn.Module, optimizer: Any) -> set[int]:
    """Parameters in the row "weights": the targets, or all linear weights but the head where nothing is sketched.

    The same matrices for every method, so that the row can be compared; adapters are none of them.
    """
    targets = getattr(optimizer, "targets", None)
    if targets is not None:
        # Under FSDP2 the module has the gathered weight while it computes.
        return {id(weight) for target in targets for weight in (target.stored, target.module.weight)}
    head = _head(model)
    return {
        id(module.weight)
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and module is not head
        and "lora_" not in name
    }


def _head(model: nn.Module | None) -> nn.Module | None:
    """The output embedding, as transformers' models or a plain attribute tell it."""
    get_head = getattr(model, "get_output_embeddings", None)
    return getattr(model, "lm_head", None) if get_head is None else get_head()


def vocabulary_size(model: nn.Module | None) -> int | None:
    """Width of the logits, by which they are recognised; None where the model does not tell."""
    weight = getattr(_head(model), "weight", None)
    if isinstance(weight, Tensor):
        return int(weight.shape[0])
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return int(size) if size is not None else None
