"""A trust policy that makes every step realise the same KL, whatever the direction: for comparisons, not for training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from logra.contracts import Delta, TrustVerdict
from logra.trust import TrustRegion


@dataclass(frozen=True, kw_only=True)
class EqualKL(TrustRegion):
    """Lengthens or shortens the rounded step until its realised KL is within `tolerance` of the budget.

    Like `TrustRegion`, but the step also grows, and the last of `max_attempts` is taken as it is.
    """

    tolerance: float = 0.05
    """Relative difference between realised KL and budget that is left."""
    max_attempts: int = 3
    """Measurements per step."""

    def verify(
        self,
        model: nn.Module,
        probe: Any,
        deltas: Mapping[nn.Module, Delta],
        *,
        budget: float,
        attempt: int,
        dense: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> TrustVerdict:
        """As `TrustRegion.verify`, in both directions."""
        verdict = super().verify(model, probe, deltas, budget=budget, attempt=attempt, dense=dense)
        realised = verdict.realised_kl
        if abs(realised / budget - 1) <= self.tolerance or attempt + 1 == self.max_attempts or realised == 0:
            return TrustVerdict(realised, "accept")
        return TrustVerdict(realised, "shrink", math.sqrt(budget / realised))


def equal_kl(budget: float) -> EqualKL:
    """The policy with a constant budget (nats per generated token) and no limit on the length of a step."""
    return EqualKL(
        kl_budget=budget, alpha_max=1e12, mismatch_correction=False, on_violation="warn", violation_ratio=1e9
    )
