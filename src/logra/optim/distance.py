"""How far: a proposed step is scaled to what a trust policy allows, rounded, and measured before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from logra.contracts import Deltas, TrustPolicy
from logra.errors import ConfigError
from logra.hashing import derive_key
from logra.optim.config import Config
from logra.optim.exchange import proposals_of_all, updates_of_all
from logra.optim.frame import Frame
from logra.optim.layer import Proposal
from logra.phases import phase
from logra.update import LowRankUpdate

_MAX_ATTEMPTS = 100
"""Far above what any trust policy shrinks; reaching it is a bug in the policy."""


@dataclass(frozen=True, kw_only=True)
class ProposedStep:
    """The directions of all layers and the length that `lr` gives them.

    Attributes:
        config: settings.
        version: policy version before the step; with the seed it draws the rounding noise.
        lr: relative step.
        proposals: of the targets that this process owns, by fully qualified name.
        frames: outlines of all targets that move.
        owner_of: the process that has each of them.
        scale: factor that makes ‖ΔW‖_F / ‖W‖_F equal to `lr`; 0 if nothing would move.
        share: of its length that the step takes, in (0, 1]; of its KL it takes the square.
    """

    config: Config
    version: int
    lr: float
    proposals: Mapping[str, Proposal]
    frames: Mapping[str, Frame]
    owner_of: Mapping[str, int]
    scale: float
    share: float = 1.0

    def decay(self, alpha: float) -> float:
        """Factor of the weights under decoupled weight decay, for a step of `alpha` times the length.

        Raises:
            ConfigError: nothing of the weights would be left.
        """
        decay = 1.0 - alpha * self.lr * self.config.weight_decay
        if decay <= 0:
            raise ConfigError(
                f"weight_decay={self.config.weight_decay!r} with lr={self.lr!r} and alpha={alpha!r} would take all of the "
                f"weights away: their product must stay below 1"
            )
        return decay

    def rounded(self, alpha: float, attempt: int) -> dict[str, LowRankUpdate]:
        """`alpha` times the step in integers, the same on all processes; every attempt draws other rounding noise."""
        decay, factor_bits = self.decay(alpha), self.config.factor_bits

        def round_one(fqn: str) -> LowRankUpdate:
            key = derive_key("round", self.config.seed, self.version, fqn, attempt)
            return self.proposals[fqn].rounded(alpha * self.scale, decay, factor_bits=factor_bits, key=key)

        return updates_of_all(self.frames, self.owner_of, round_one, factor_bits=factor_bits, decay=decay)

    def within(
        self,
        trust: TrustPolicy,
        model: nn.Module,
        probe: Any,
        *,
        modules: Mapping[str, nn.Module],
        mismatch: float,
        dense: Mapping[nn.Parameter, Tensor],
    ) -> tuple[dict[str, LowRankUpdate] | None, dict[str, float]]:
        """Predict, scale, round and verify.

        Args:
            trust: the policy.
            model: the model, not changed.
            probe: what the policy measures on.
            modules: fully qualified name -> target module.
            mismatch: nats per token that are taken off the budget.
            dense: parameters that are no targets -> what the unscaled step subtracts from them.

        Returns:
            The updates, None if the policy rejects them; and predicted_kl, kl_budget, alpha, realised_kl, num_shrinks.
        """
        decay = self.decay(1.0)
        moving = self.frames if self.scale > 0 else {}
        proposals = proposals_of_all(self.proposals, moving, self.owner_of)
        deltas = Deltas(
            {modules[fqn]: partial(proposed.delta, self.scale, decay) for fqn, proposed in proposals.items()}
        )
        with phase("probe"):
            decision = trust.predict(model, probe, deltas, step=self.version, mismatch=mismatch, dense=dense)
        del proposals, deltas  # the rounded ones take their place
        budget, alpha = self.share**2 * decision.budget, self.share * decision.alpha
        measured = {"predicted_kl": decision.predicted_kl, "kl_budget": budget}
        for attempt in range(_MAX_ATTEMPTS):
            updates = self.rounded(alpha, attempt)
            deltas = Deltas({modules[fqn]: updates[fqn].delta for fqn in moving})
            with phase("probe"):
                verdict = trust.verify(
                    model,
                    probe,
                    deltas,
                    budget=budget,
                    attempt=attempt,
                    dense={parameter: alpha * displacement for parameter, displacement in dense.items()},
                )
            measured |= {"alpha": alpha, "realised_kl": verdict.realised_kl, "num_shrinks": float(attempt)}
            if verdict.action == "accept":
                return updates, measured
            if verdict.action == "reject":
                return None, measured
            alpha *= verdict.factor
        raise AssertionError("a trust policy must reject after a bounded number of shrinks")
