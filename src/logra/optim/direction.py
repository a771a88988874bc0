"""Which way: an update direction from the factors of a gradient. Pure functions, never of a dense matrix.

A gradient (or its momentum) comes either as one sketch, S [rows, r], or in factors Q R with orthonormal Q [out, k] and
R [k, in]. Scales of a direction mean nothing across steps: the optimizer normalises the whole update to `lr`. They do mean
something between layers.
"""

import torch
from torch import Tensor

BETA2 = 0.95
"""Decay of every second moment (the paper's value)."""
EPSILON = 1e-8
"""Relative to the mean root moment, so that it has no unit (the paper's form)."""
SPECTRAL_RTOL = 1e-4
"""Singular values below this share of the largest are rounding noise of an fp32 sketch, not directions."""


def ema(moment: Tensor | None, value: Tensor, decay: float) -> Tensor:
    """decay * moment + (1 - decay) * value, a new tensor; a missing moment counts as zero."""
    return (1 - decay) * value if moment is None else decay * moment + (1 - decay) * value


def row_moment(factor: Tensor) -> Tensor:
    """Mean over columns of S², [rows], from S [rows, r] (the paper's second moment of an output row)."""
    return factor.square().mean(dim=1)


def row_moment_of_factors(q: Tensor, r: Tensor) -> Tensor:
    """Mean over columns of (Q R)², [out]: the row norms of Q R through the k x k Gram matrix R Rᵀ."""
    return ((q @ (r @ r.T)) * q).sum(dim=1).clamp_min(0) / r.shape[1]


def column_moment_of_factors(q: Tensor, r: Tensor) -> Tensor:
    """Mean over rows of (Q R)², [in]; Q has orthonormal columns."""
    return r.square().sum(dim=0) / q.shape[0]


def inverse_root(moment: Tensor, num_updates: int) -> Tensor:
    """1 / (sqrt(v / (1 - β₂ᵗ)) + ε mean(sqrt(v / (1 - β₂ᵗ)))), 0 where all moments vanish.

    Args:
        moment: v, fp32 [n], an EMA with decay β₂ that started from zero.
        num_updates: t, number of updates in it, >= 1.
    """
    root = (moment / (1 - BETA2**num_updates)).sqrt()
    denominator = root + EPSILON * root.mean()
    return torch.where(denominator > 0, denominator.reciprocal(), torch.zeros_like(denominator))


def row_adam(factor: Tensor, moment: Tensor, num_updates: int) -> Tensor:
    """D = S / (sqrt(v̂) + ε mean(sqrt(v̂))), row by row (LoGRA, arXiv 2610.06647).

    Args:
        factor: S [rows, r], or the Q of Q R, whose rows scale alike.
        moment: v [rows].
        num_updates: t of the bias correction.
    """
    return factor * inverse_root(moment, num_updates)[:, None]


def restore_norm(direction: Tensor, sketch: Tensor) -> Tensor:
    """The direction rescaled to the Frobenius norm of the sketch it came from (the paper's last step)."""
    norm = direction.norm()
    return direction * (sketch.norm() / norm) if norm > 0 else direction


def spectral(factor: Tensor) -> Tensor:
    """U Vᵀ of S = U Σ Vᵀ inside its numerical rank, [rows, r] (Muon's direction, of one sketch)."""
    u, sigma, vh = torch.linalg.svd(factor, full_matrices=False)
    return (u * (sigma > SPECTRAL_RTOL * sigma[0])) @ vh


def spectral_of_factors(q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Q R with every singular value inside the numerical rank set to one, in factors [out, k] and [k, in].

    With R = U Σ Vᵀ the singular vectors of Q R are Q U and V. R has k rows, so this costs a k x k decomposition.
    """
    q2, upper = torch.linalg.qr(r.T)
    u, sigma, vh = torch.linalg.svd(upper.T, full_matrices=False)
    kept = sigma > SPECTRAL_RTOL * sigma[0]
    return q @ (u * kept), (vh * kept[:, None]) @ q2.T


def balanced(q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Q R = (Q U √Σ) (√Σ Vᵀ): factors of equal size, so that rounding to few bits hurts neither more than the other."""
    q2, upper = torch.linalg.qr(r.T)
    u, sigma, vh = torch.linalg.svd(upper.T, full_matrices=False)
    root = sigma.sqrt()
    return q @ (u * root), (vh * root[:, None]) @ q2.T


def factored_scales(row: Tensor, column: Tensor, num_updates: int) -> tuple[Tensor, Tensor]:
    """Scales [out] and [in] that divide G_ij by the root of v_row_i v_column_j / mean(v_row) (Adafactor's second moment).

    Args:
        row: EMA of the row moments, [out].
        column: EMA of the column moments, [in].
        num_updates: t of the bias correction.
    """
    scale = (row.mean() / (1 - BETA2**num_updates)).sqrt()
    return inverse_root(row, num_updates) * scale, inverse_root(column, num_updates)
