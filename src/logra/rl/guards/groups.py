"""Groups of completions that carry no signal, and how they are replaced by groups that do.

A generation batch is TRL's dictionary of tensors. Its groups are `num_generations` consecutive rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from logra.errors import ConfigError, DataError

_PADDED_LEFT = ("prompt_ids", "prompt_mask")
_PADDED_RIGHT = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
)
_ROWS = ("advantages",)
_TOTALS = ("num_items_in_batch",)


def replace_rows(
    batch: Mapping[str, Any], other: Mapping[str, Any], rows: Sequence[int], by: Sequence[int], pad_token_id: int
) -> dict[str, Any]:
    """`batch` with some rows taken from `other`; both are padded to the larger width.

    Args:
        batch: a generation batch.
        other: another one with the same fields; widths may differ.
        rows: rows of `batch` that are replaced.
        by: rows of `other` that take their place, as many.
        pad_token_id: what pads token ids.

    Returns:
        A new batch. `num_items_in_batch` is that of `batch` and must be counted anew.

    Raises:
        ConfigError: fields that cannot be put together row by row (images).
    """
    known = {*_PADDED_LEFT, *_PADDED_RIGHT, *_ROWS, *_TOTALS}
    if unknown := sorted({*batch, *other} - known):
        raise ConfigError(f"guards.resample=True: batches with {', '.join(unknown)} cannot be put together by rows")
    merged = dict(batch)
    for name in (*_PADDED_LEFT, *_PADDED_RIGHT, *_ROWS):
        if name not in batch:
            continue
        own, new = batch[name], other[name]
        if own.ndim == 2 and own.shape[1] != new.shape[1]:
            value = pad_token_id if name.endswith("_ids") else 0
            width = max(own.shape[1], new.shape[1])
            left = name in _PADDED_LEFT
            own, new = (
                F.pad(tensor, (width - tensor.shape[1], 0) if left else (0, width - tensor.shape[1]), value=value)
                for tensor in (own, new)
            )
        own = own.clone()
        own[list(rows)] = new[list(by)]
        merged[name] = own
    return merged


def num_loss_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Tokens of a batch that enter the loss, on this process."""
    mask = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).sum()


class SignalCount:
    """What the groups of one step's batches came to, for the error that ends a futile search."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_dropped = 0
        self.equal: Counter[float] = Counter()
        """Groups whose rewards are all equal, by that reward."""

    def add(self, totals: Tensor, signal_free: Tensor, dropped: Tensor, num_generations: int) -> None:
        """Count one generation batch of all processes.

        Args:
            totals: fp32 [completions], NaN where not scored.
            signal_free: bool [completions], of groups without signal, the dropped ones too.
            dropped: bool [completions], of groups that were dropped for a bad reward.
            num_generations: completions per group.
        """
        groups = totals.view(-1, num_generations)
        lost = dropped.view(-1, num_generations).any(dim=1)
        equal = signal_free.view(-1, num_generations).all(dim=1) & ~lost
        self.num_groups += len(groups)
        self.num_dropped += int(lost.sum())
        self.equal.update(round(value, 6) for value in torch.nanmean(groups[equal], dim=1).tolist())

    def error(self, num_batches: int) -> DataError:
        """Why no batch had a group to learn from."""
        common = ", ".join(f"{count} with reward {value:g}" for value, count in self.equal.most_common(3))
        dropped = f", {self.num_dropped} dropped for a bad reward" if self.num_dropped else ""
        return DataError(
            f"guards.max_resampled_batches={num_batches}: of {self.num_groups} groups none has a signal to learn from: in "
            f"{sum(self.equal.values())} all completions have the same reward (most often: {common or 'none'}){dropped}. "
            f"The task is too easy or too hard for this policy, or its reward does not tell answers apart. Choose other "
            f"problems, take more samples per group (rollout.num_samples), or set guards.resample=false"
        )
