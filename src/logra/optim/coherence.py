"""How far successive gradients agree, and so what share of its length a step deserves.

A spectral step has the same length, and from a trust region the same KL, whether its gradient comes from many samples or from
the few of a batch in which hardly a group has a signal. What tells signal from noise is the momentum: gradients that agree
add up in M, gradients that do not cancel. Adam's m / sqrt(v), as one number for all weights:

    coherence = min(1, ‖M̂‖_F / sqrt(v / (1 - β₂ᵗ))),   v <- β₂ v + (1 - β₂) ‖Ĝ‖²_F,   β₂ = 0.99

over the targets that move, where M̂ is M / (1 - βⁿ) of each target, n its own updates: an expert that tokens seldom reach has
fewer than others. The coherence is 1 in the first step, stays 1 for gradients that are all equal, and falls to
sqrt((1 - β) / (1 + β)) for gradients that have nothing in common: 0.23 at β = 0.9. Where gradients have a higher rank than
the momentum keeps, it is lower: equal ones lose something too, and those with nothing in common are left with about 1 - β.
"""

import math

BETA2 = 0.99
"""Decay of the mean square of gradient norms, v."""


class Coherence:
    """The mean square of gradient norms over past updates, and what follows from it.

    Attributes:
        num_updates: t, the updates averaged so far.
        mean_square: v.
    """

    def __init__(self, num_updates: int = 0, mean_square: float = 0.0) -> None:
        self.num_updates = num_updates
        self.mean_square = mean_square

    def after(self, gradient_norm: float) -> "Coherence":
        """The average with one more gradient."""
        mean_square = BETA2 * self.mean_square + (1 - BETA2) * gradient_norm**2
        return Coherence(self.num_updates + 1, mean_square)

    def of(self, mean_norm: float) -> float:
        """The coherence, in (0, 1].

        Args:
            mean_norm: ‖M̂‖_F over all targets that move.
        """
        return min(1.0, mean_norm / math.sqrt(self.mean_square / (1 - BETA2**self.num_updates)))
