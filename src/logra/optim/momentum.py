"""Momentum in compact form: M <- β M + (1-β) Ĝ without a dense buffer. Pure functions."""

import torch
from torch import Tensor


def truncated_sum(q_m: Tensor, r_m: Tensor, q: Tensor, r: Tensor, beta: float, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-`rank` approximation of β Q_M R_M + (1-β) Q R, in factors.

    QR of [Q_M, Q] and of [β R_M; (1-β) R]ᵀ leaves a core of at most 2r x 2r, whose SVD is cut at `rank`.

    Args:
        q_m, q: [out, k], orthonormal columns.
        r_m, r: [k, in].
        beta: decay of the old momentum, in [0, 1).
        rank: kept rank.

    Returns:
        Q' [out, k'] with orthonormal columns and R' = Σ Vᵀ [k', in], k' = min(rank, core size).
    """
    out_basis, out_upper = torch.linalg.qr(torch.cat([q_m, q], dim=1))
    in_basis, in_upper = torch.linalg.qr(torch.cat([beta * r_m, (1 - beta) * r], dim=0).T)
    u, sigma, vh = torch.linalg.svd(out_upper @ in_upper.T, full_matrices=False)
    u, sigma, vh = u[:, :rank], sigma[:rank], vh[:rank]
    return out_basis @ u, (sigma[:, None] * vh) @ in_basis.T


def carry_over(momentum: Tensor, old_signs: Tensor, new_signs: Tensor) -> Tensor:
    """The sketch momentum M = G Aᵀ expressed in new projections: M (A A'ᵀ) / in.

    M A / in is the smallest gradient with sketch M, up to the off-diagonal part of A Aᵀ ≈ in I; its sketch by A' follows.
    Of all multiples of M A A'ᵀ this one, 1 / (in + r) up to r / in, comes closest to G A'ᵀ on average: most of G lies
    outside the rows of A, so what is carried is short, and M A A'ᵀ / r, whose expectation is G A'ᵀ, is mostly noise.

    Args:
        momentum: M [rows, r].
        old_signs: A diag(1/s) [r, in], with the scales that M was taken with.
        new_signs: A' diag(s') [r, in].
    """
    return momentum @ (old_signs @ new_signs.T) / old_signs.shape[1]
