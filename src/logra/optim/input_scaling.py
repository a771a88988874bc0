"""Input scaling: s = c^(-1/2) from the running second moment c of every input feature, rounded to powers of two."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from logra import distributed
from logra.sketch.capture import Capture
from logra.sketch.targets import Target

DECAY = 0.95
"""Decay of the EMA of c over updates."""
POWER = -0.5
"""Of c in s: each feature is divided by its root mean square."""
MAX_EXPONENT = 4
"""Scales are held within 2^±4 of their median: a feature that is nearly always zero must not dominate."""


def moment_ema(moment: Tensor | None, square_mean: Tensor) -> Tensor:
    """c <- DECAY c + (1 - DECAY) mean over tokens of x², [in]; the first value is taken whole."""
    return square_mean if moment is None else DECAY * moment + (1 - DECAY) * square_mean


def exponents(moment: Tensor) -> Tensor:
    """round(log2(c^(-1/2)) - median), clamped to ±4, int32 [in].

    The common scale of s means nothing (an update is normalised), so its median is set to one.
    """
    log_scale = POWER * moment.clamp_min(torch.finfo(torch.float32).tiny).log2()
    return (log_scale - log_scale.median()).round().clamp(-MAX_EXPONENT, MAX_EXPONENT).to(torch.int32)


def update_scales(
    capture: Capture,
    targets: Sequence[Target],
    state: Mapping[Any, MutableMapping[str, Any]],
    *,
    refresh: bool,
) -> None:
    """Fold this window's input moments into their EMA.

    Args:
        capture: holds the moments of the window and receives the scales.
        targets: that were updated, on all processes the same.
        state: parameter -> its optimizer state.
        refresh: set the scales anew; they change together with the projections only.
    """
    parts = []
    for target in targets:
        moments = capture.input_moments(target.fqn)
        square_sum, num_tokens = moments or (torch.zeros(target.in_features, device=target.parameter.device), 0.0)
        parts += [square_sum, square_sum.new_tensor([num_tokens])]
    totals = torch.cat(parts)  # one collective for all of them
    distributed.sum_(totals)
    summed = totals.split([part.numel() for part in parts])
    counts = torch.cat(summed[1::2]).tolist()
    for target, square_sum, num_tokens in zip(targets, summed[::2], counts, strict=True):
        if num_tokens == 0:
            continue  # no token reached it (an expert, say): its scales stay
        own = state[target.parameter]
        own["input_second_moment"] = moment_ema(own.get("input_second_moment"), square_sum / num_tokens)
        if refresh:
            own["input_exponents"] = exponents(own["input_second_moment"])
            capture.set_exponents(target.fqn, own["input_exponents"])
