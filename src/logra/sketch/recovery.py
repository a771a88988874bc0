"""Recover a low-rank gradient from two sketches in a single pass (Tropp, Yurtsever, Udell, Cevher 2017, algorithm 4)."""

import torch
from torch import Tensor


def recover(on_in: Tensor, on_out: Tensor, signs_out: Tensor) -> tuple[Tensor, Tensor]:
    """Ĝ = Q R with Q = orth(S) and R = (B Q)⁺ T.

    Exact when rank(G) <= r. Works for any S, also one without full rank: the completed columns of Q then meet rows of R
    that are zero up to rounding.

    Args:
        on_in: S = G Aᵀ, fp32 [out, r].
        on_out: T = B G, fp32 [l, in] with l >= min(r, out).
        signs_out: Bᵀ, fp32 [out, l].

    Returns:
        Q, fp32 [out, k] with orthonormal columns, k = min(r, out), and R, fp32 [k, in].
    """
    q, _ = torch.linalg.qr(on_in)
    # B Q has full column rank for random signs and l >= k: least squares by a second QR is (B Q)⁺ T.
    q2, upper = torch.linalg.qr(signs_out.T @ q)
    return q, torch.linalg.solve_triangular(upper, q2.T @ on_out, upper=True)
