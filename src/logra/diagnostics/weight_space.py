"""What a low-rank estimate keeps of a dense gradient. Pure functions of one layer's matrices.

With the dense gradient G [out, in], its estimate E = L R from the sketch and the final update U = L' R':

    cosine       <G, E> / (‖G‖ ‖E‖)                         norm_ratio   ‖E‖ / ‖G‖
    residual     ‖G - E‖² / ‖G‖²                            above 1 where E is long and noisy (one-sided sketches)
    outside      1 - ‖P_L G P_R‖² / ‖G‖²                    P: projectors onto the columns of L and the rows of R;
                                                            what no other core between these factors could recover
    rank         singular values above max(out, in) eps σ_1
    rank_99      smallest k whose best rank-k approximation holds 99 % of ‖G‖²
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from logra.contracts import Delta

ENERGY_SHARE = 0.99


@dataclass(frozen=True)
class LayerReport:
    """One layer in weight space; see the module docstring. Cosines and ratios have no unit.

    Attributes:
        gradient_cosine: of the estimated gradient with G.
        gradient_norm_ratio: ‖estimate‖ / ‖G‖.
        update_cosine: of the final update (without weight decay) with G; 1 means steepest descent.
        update_norm_ratio: ‖update‖ / ‖G‖, in the units of a learning rate.
        residual_energy: ‖G - estimate‖² / ‖G‖².
        outside_energy: share of ‖G‖² outside the column and row space of the estimate.
        rank: numerical rank of G.
        rank_99: rank that holds 99 % of ‖G‖².
    """

    gradient_cosine: float
    gradient_norm_ratio: float
    update_cosine: float
    update_norm_ratio: float
    residual_energy: float
    outside_energy: float
    rank: float
    rank_99: float


def report(gradient: Tensor, estimate: Delta, update: Delta) -> LayerReport:
    """Compare one layer's gradient with its estimate and with the update made of it.

    Args:
        gradient: G, fp32 [out, in], not zero.
        estimate: the gradient recovered from the sketch.
        update: the change about to be merged, subtracted from the weight.
    """
    norm = _norm(gradient)
    dense = estimate.out_factor @ estimate.in_factor
    estimate_norm = _norm(dense)
    estimate_cosine = _inner(gradient, dense) / (norm * estimate_norm) if estimate_norm > 0 else 0.0
    residual = _norm(gradient - dense) ** 2 / norm**2
    dense = update.out_factor @ update.in_factor
    update_norm = _norm(dense)
    update_cosine = _inner(gradient, dense) / (norm * update_norm) if update_norm > 0 else 0.0
    rank, rank_99 = numerical_ranks(gradient)
    return LayerReport(
        gradient_cosine=estimate_cosine,
        gradient_norm_ratio=estimate_norm / norm,
        update_cosine=update_cosine,
        update_norm_ratio=update_norm / norm,
        residual_energy=residual,
        outside_energy=outside_energy(gradient, estimate),
        rank=rank,
        rank_99=rank_99,
    )


def outside_energy(gradient: Tensor, estimate: Delta) -> float:
    """Share of ‖G‖² outside the column space of `estimate.out_factor` and the row space of `estimate.in_factor`.

    Args:
        gradient: fp32 [out, in], not zero.
        estimate: factors [out, r] and [r, in].
    """
    basis_out, _ = torch.linalg.qr(estimate.out_factor)
    basis_in, _ = torch.linalg.qr(estimate.in_factor.T)
    residual = gradient - basis_out @ (basis_out.T @ gradient @ basis_in) @ basis_in.T
    return (_norm(residual) / _norm(gradient)) ** 2


def numerical_ranks(gradient: Tensor) -> tuple[int, int]:
    """Numerical rank, and the rank that holds 99 % of ‖G‖², of a matrix [out, in] that is not zero."""
    values = torch.linalg.svdvals(gradient).double()
    tolerance = values[0] * max(gradient.shape) * torch.finfo(gradient.dtype).eps
    energy = values.square().cumsum(0)
    enough = energy >= ENERGY_SHARE * energy[-1]
    return int((values > tolerance).sum()), int(enough.nonzero()[0]) + 1


def _norm(matrix: Tensor) -> float:
    return torch.linalg.vector_norm(matrix, dtype=torch.float64).item()


def _inner(a: Tensor, b: Tensor) -> float:
    return torch.dot(a.double().flatten(), b.double().flatten()).item()
