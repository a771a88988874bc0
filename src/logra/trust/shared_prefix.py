"""Responses to one prompt read that prompt once.

A probe of a few short responses to long prompts spends most of its tokens on prompts, several times on the same one. Up
to the token before the first generated one, rows with equal tokens have equal keys and values: these are computed once
and handed to all of them. The numbers are the same up to fp32 rounding.

Legend: n rows of the batch, U distinct prefixes, q columns of the longest prefix, w columns of the longest rest.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra.trust.probe import ProbeBatch


@dataclass(frozen=True)
class SplitBatch:
    """A batch in two parts: the distinct prefixes, and what follows them in each row.

    Attributes:
        prefix_ids, prefix_mask: int64 [U, q], filled up on the right.
        kind: int64 [n], the prefix of each row.
        rest_ids: int64 [n, w]: the last prompt token, the response, and filling on the right.
        rest_mask: int64 [n, q + w], of prefix and rest.
        rest_positions: int64 [n, w], the positions that the rest has in the whole row.
        columns: int64 [t], column in the rest whose logits predict each generated token.
    """

    prefix_ids: Tensor
    prefix_mask: Tensor
    kind: Tensor
    rest_ids: Tensor
    rest_mask: Tensor
    rest_positions: Tensor
    columns: Tensor


def cache_argument(model: Any) -> str | None:
    """Name under which the model's forward takes keys and values; None if it cannot be handed those of other rows.

    Args:
        model: a transformers model.
    """
    parameters = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    if name is None or not {"position_ids", "attention_mask", "use_cache"} <= parameters.keys():
        return None
    return name if keeps_plain_keys(model) else None


def keeps_plain_keys(model: Any) -> bool:
    """Whether every layer of a transformers model keeps plain keys and values: no window, no state of its own."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def split_prefixes(batch: ProbeBatch) -> SplitBatch | None:
    """Cut every row before its last prompt token; None where no two rows begin alike, or prompts have one token."""
    num_rows, width = batch.input_ids.shape
    starts = torch.full((num_rows,), width, device=batch.columns.device)
    starts = starts.scatter_reduce(0, batch.rows, batch.columns, "amin")
    rows = [row[:start] for row, start in zip(batch.input_ids.tolist(), starts.tolist(), strict=True)]
    distinct = list(dict.fromkeys(map(tuple, rows)))
    if len(distinct) == num_rows or not all(distinct):
        return None
    device = batch.input_ids.device
    kind = torch.tensor([distinct.index(tuple(row)) for row in rows], device=device)
    prefixes = [torch.tensor(prefix, device=device) for prefix in distinct]
    columns = torch.arange(int((batch.attention_mask.sum(dim=1) - starts).max()), device=device)
    positions = starts[:, None] + columns  # beyond the row's end: clamped, and masked out
    rest_mask = batch.attention_mask.gather(1, positions.clamp_max(width - 1)) * (positions < width)
    prefix_mask = _pad([torch.ones_like(prefix) for prefix in prefixes])
    return SplitBatch(
        prefix_ids=_pad(prefixes),
        prefix_mask=prefix_mask,
        kind=kind,
        rest_ids=batch.input_ids.gather(1, positions.clamp_max(width - 1)) * rest_mask,
        rest_mask=torch.cat([prefix_mask[kind], rest_mask], dim=1),
        rest_positions=positions.clamp_max(width - 1),
        columns=batch.columns - starts[batch.rows],
    )


def _pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)
