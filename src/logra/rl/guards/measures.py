"""Numbers about a rollout that sentinels look at and TRL does not report."""

from collections.abc import Sequence

import torch
from torch import Tensor

NGRAM = 4
"""Tokens of a sequence whose repetition counts."""


def repetition(completion_ids: Sequence[Sequence[int]], length: int = NGRAM) -> float:
    """Mean over completions of the share of token sequences that occurred earlier in the same completion.

    Args:
        completion_ids: token ids of every completion, without padding.
        length: tokens of a sequence. A completion that is not longer has nothing to repeat and counts as 0.

    Example:
        >>> repetition([[1, 2, 1, 2, 1, 2]], length=2)  # (1,2) (2,1) and three repetitions
        0.6
    """
    shares = []
    for ids in completion_ids:
        sequences = [tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)]
        shares.append(1 - len(set(sequences)) / len(sequences) if sequences else 0.0)
    return sum(shares) / len(shares) if shares else 0.0


def weight_sums(trainer_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
    """Number, sum and sum of squares of the importance weights w = exp(trainer - rollout) of all generated tokens.

    Args:
        trainer_logps: fp32 [B, C], log-probabilities under the trained weights, nats.
        rollout_logps: fp32 [B, C], those that the engine sampled with; NaN where it reported none, which is left out.
        mask: [B, C], 1 at generated tokens.

    Returns:
        fp64 [3]; sums of several processes may be added up.
    """
    log_weights = (trainer_logps.double() - rollout_logps.double())[mask.bool()]
    weights = log_weights[log_weights.isfinite()].exp()
    return torch.stack([weights.new_tensor(float(weights.numel())), weights.sum(), weights.square().sum()])


def effective_share(sums: Tensor) -> float | None:
    """Kish's effective sample size over the number of tokens, (Σw)² / (n Σw²), in (0, 1]; None without tokens.

    Args:
        sums: from `weight_sums`.
    """
    number, total, squares = sums.tolist()
    return total**2 / (number * squares) if number > 0 and squares > 0 else None
