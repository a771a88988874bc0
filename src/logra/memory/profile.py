"""`logra.memory.profile`: what a model and its optimizer hold right now, by category."""

from typing import Any

import torch
from torch import nn

from logra.errors import LograError
from logra.memory.categories import CATEGORIES
from logra.memory.owners import owned_tensors, storages_of


def profile(model: nn.Module, opt: Any = None, *, reference_model: nn.Module | None = None) -> dict[str, int]:
    """Live bytes by category, of everything that model and optimizer hold at this moment.

    Storages are counted once, whoever shares them. What only a running step holds (activations, logits, scratch) is
    seen by `logra.memory.Ledger` alone, and is 0 here between two steps. On CUDA the categories are those of one device
    together with what the allocator has given out beyond them, as "other".

    Args:
        model: the policy.
        opt: a SketchOptimizer or any torch optimizer.
        reference_model: a frozen second copy, or None.

    Returns:
        Bytes by the names in `logra.memory.categories.CATEGORIES`.

    Raises:
        LograError: `model` is not a module.

    Example:
        >>> logra.memory.profile(model, opt)["weights"]
        53477376
    """
    if not isinstance(model, nn.Module):
        raise LograError(f"profile: model is a {type(model).__name__}; give the nn.Module")
    found = dict.fromkeys(CATEGORIES, 0)
    seen: set[int] = set()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for category, tensor in owned_tensors(model, opt, reference_model):
        for storage in storages_of(tensor):
            if storage._cdata not in seen and storage.device.type == device.type:
                seen.add(storage._cdata)
                found[category] += storage.nbytes()
    if device.type == "cuda":
        found["other"] = max(torch.cuda.memory_allocated(device) - sum(found.values()), 0)
    return found
