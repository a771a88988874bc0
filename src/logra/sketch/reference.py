"""Slow float64 reference of the sketches and of recovery, from a dense gradient. The tests compare against it."""

import torch
from torch import Tensor


def sketch_in(gradient: Tensor, signs_in: Tensor, scales: Tensor | None = None) -> Tensor:
    """S = G diag(s) Aᵀ, float64 [out, r], from G [out, in], A [r, in] and s [in]."""
    gradient = gradient.double()
    if scales is not None:
        gradient = gradient * scales.double()
    return gradient @ signs_in.double().T


def sketch_out(gradient: Tensor, signs_out: Tensor) -> Tensor:
    """T = B G, float64 [l, in], from G [out, in] and Bᵀ [out, l]."""
    return signs_out.double().T @ gradient.double()


def recover(on_in: Tensor, on_out: Tensor, signs_out: Tensor) -> Tensor:
    """Ĝ = Q (B Q)⁺ T, float64 [out, in], dense and by pseudo-inverse (Tropp et al. 2017)."""
    u, sigma, _ = torch.linalg.svd(on_in.double(), full_matrices=False)
    q = u[:, sigma > sigma.max() * 1e-12]
    return q @ torch.linalg.pinv(signs_out.double().T @ q) @ on_out.double()
