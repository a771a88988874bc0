"""How long a step is before anything scales it: ‖ΔW‖_F / ‖W‖_F over all targets equals `lr`."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from logra.contracts import Delta
from logra.errors import LograError
from logra.optim import exchange
from logra.optim.layer import Proposal, mean_gradient_norm
from logra.sketch.targets import Target


def weight_norm(targets: Sequence[Target]) -> Tensor:
    """‖W‖_F over all targets, fp32 scalar, the same on every process.

    Raises:
        LograError: a weight is not finite, or all are zero.
    """
    norms = exchange.weight_norms(list(targets))
    norm = torch.linalg.vector_norm(norms)
    value = norm.item()
    if not math.isfinite(value):
        names = [target.fqn for target, own in zip(targets, norms, strict=True) if not torch.isfinite(own)]
        raise LograError(f"the weights of {', '.join(names)} are not finite: load a good checkpoint")
    if value == 0:
        raise LograError("the weights of all targets are zero: lr is relative to their norm, so they would stay zero")
    return norm


def update_norm(deltas: Iterable[Delta]) -> Tensor:
    """‖ΔW‖_F over all targets, fp32 scalar."""
    return torch.stack([delta.norm_squared() for delta in deltas]).sum().sqrt()


def mean_norm(own: Mapping[str, Proposal], fqns: Sequence[str], beta: float, device: torch.device) -> float:
    """‖M̂‖_F over all targets that move, the same on every process.

    Args:
        own: proposals of this process's targets, with their next two-sided momentum.
        fqns: of all targets that move.
        beta: β, decay of the momentum.
        device: of the proposals.
    """
    norms = {fqn: mean_gradient_norm(proposal.state, beta) for fqn, proposal in own.items()}
    return norm_over_targets(exchange.numbers_of_all(norms, fqns, device))


def norm_over_targets(norms: Tensor) -> float:
    """The norm over all targets from that of each, fp32 [targets]; in fp64, as their squares may leave the range of fp32."""
    return torch.linalg.vector_norm(norms, dtype=torch.float64).item()


def step_scale(lr: float, weight_norm: Tensor, update_norm: Tensor) -> float:
    """The factor that makes a step of `update_norm` as long as `lr` says; 0 for a step that moves nothing."""
    return (lr * weight_norm / update_norm).item() if update_norm > 0 else 0.0
