"""Input scaling: s = c^(-1/2) from the running second moment c of every input feature, rounded to powers of two."""

import torch
from torch import Tensor

DECAY = 0.95
"""Decay of the EMA of c over updates."""
MAX_RATIO = 16
"""Scales are held within 2^±4 of their geometric mean: a feature that is nearly always zero must not dominate."""


def moment_ema(moment: Tensor | None, square_mean: Tensor) -> Tensor:
    """c <- DECAY c + (1 - DECAY) mean over tokens of x², [in]; the first value is taken whole."""
    return square_mean if moment is None else DECAY * moment + (1 - DECAY) * square_mean


def exponents(moment: Tensor) -> Tensor:
    """round(log2(c^(-1/2))) minus the rounded mean, clamped to ±4, int32 [in].

    The common scale of s means nothing (an update is normalised), so its geometric mean is set to about one.
    """
    tiny = torch.finfo(torch.float32).tiny
    log_scale = -0.5 * moment.clamp_min(tiny).log2()
    limit = MAX_RATIO.bit_length() - 1
    return (log_scale - log_scale.median()).round().clamp(-limit, limit).to(torch.int32)
