"""Merging updates into what a process holds of the targets' weights, in every weight storage."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from logra import shards, storage
from logra.merge_rule import MergeRule
from logra.sketch.targets import Target
from logra.update import LowRankUpdate


def add_low_planes(
    weight_storage: str, targets: Iterable[Target], state: MutableMapping[Tensor, dict[str, Any]]
) -> None:
    """Give every target the low plane that this storage needs, `lo` in its state: zeros.

    A bf16 checkpoint is the canonical value with nothing in the low plane.
    """
    dtype = storage.LOW_DTYPES.get(weight_storage)
    if dtype is not None:
        for target in targets:
            state[target.parameter]["lo"] = torch.zeros_like(target.parameter, dtype=dtype)


def merge(target: Target, state: Mapping[str, Any], update: LowRankUpdate, rule: MergeRule) -> None:
    """The rows and columns of an update into what this process holds of a target's weight, parameter and low plane.

    Args:
        target: whose weight it is.
        state: of the target, with `lo` where the weight storage has a low plane.
        update: of the whole weight.
        rule: of the run, for this version and name.
    """
    held = target.sharding.held
    if 0 in held.shape:
        return
    lo: Tensor | None = state.get("lo")
    if lo is not None:
        lo = shards.local(lo).T if target.transposed else shards.local(lo)
    storage.apply_update_(update, target.weight, lo, rows=held.rows, columns=held.columns, rule=rule)
