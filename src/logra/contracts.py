"""The types that pass between packages of one level: a proposed weight change and the policy that prices it.

`optim` proposes `Delta`s, a `TrustPolicy` (implemented by `logra.trust.TrustRegion`) predicts how far they move the
policy and answers with a scale. Neither package imports the other. A `StepObserver` (`logra.diagnostics`) looks at a step
that is about to be merged, and changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Delta:
    """A low-rank change of one weight, in factors: W <- W * decay - out_factor @ in_factor.

    Attributes:
        out_factor: fp32 [out, r].
        in_factor: fp32 [r, in].
        decay: factor of decoupled weight decay, applied to the weight before the subtraction; 1.0 means none.
    """

    out_factor: Tensor
    in_factor: Tensor
    decay: float = 1.0

    def scaled(self, alpha: float) -> "Delta":
        """The same direction, `alpha` times as long. The displacement of the decay scales along with it."""
        return Delta(self.out_factor * alpha, self.in_factor, 1.0 - alpha * (1.0 - self.decay))

    def subtracted_output(self, x: Tensor) -> Tensor:
        """out_factor (in_factor x): what the change takes away from the module's output, decay left aside.

        Args:
            x: [..., in], any floating dtype.

        Returns:
            [..., out] in the dtype of `x`.
        """
        return (x @ self.in_factor.to(x.dtype).T) @ self.out_factor.to(x.dtype).T

    def norm_squared(self) -> Tensor:
        """‖out_factor in_factor‖²_F from two r x r Gram matrices, fp32 scalar. The product is never formed."""
        gram_out = self.out_factor.T @ self.out_factor
        gram_in = self.in_factor @ self.in_factor.T
        return (gram_out * gram_in.T).sum().clamp_min(0.0)


class Deltas(Mapping[nn.Module, Delta]):
    """Weight changes that are made one at a time, when they are asked for, and kept by nobody.

    Args:
        makers: target module -> what makes its change.
    """

    def __init__(self, makers: Mapping[nn.Module, Callable[[], Delta]]) -> None:
        self._makers = makers

    def __getitem__(self, module: nn.Module) -> Delta:
        return self._makers[module]()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class TrustDecision:
    """What the prediction allows.

    Attributes:
        alpha: factor by which the proposed step may be taken, >= 0.
        predicted_kl: KL of the unscaled proposal, nats per generated token.
        budget: KL allowed for this step, nats per generated token.
    """

    alpha: float
    predicted_kl: float
    budget: float


@dataclass(frozen=True)
class TrustVerdict:
    """What the measurement of the rounded, not yet merged update says.

    Attributes:
        realised_kl: KL that merging this update will realise on the probe, nats per generated token.
        action: "accept", "shrink" (take `factor` times the step and measure again) or "reject" (skip the step).
        factor: in (0, 1) for "shrink", 1.0 otherwise.
    """

    realised_kl: float
    action: str
    factor: float = 1.0


class TrustPolicy(Protocol):
    """Prices a proposed update before anything is written. Implemented by `logra.trust.TrustRegion`."""

    def make_probe(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Check the tensors ([batch, tokens] each) and keep what the probe needs. Raises ProbeError."""
        ...

    def predict(
        self,
        model: nn.Module,
        probe: Any,
        deltas: Mapping[nn.Module, Delta],
        *,
        step: int,
        mismatch: float = 0.0,
        dense: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> TrustDecision:
        """Predict the KL of the proposal with a forward tangent and answer with the allowed scale.

        `dense`: other parameters that move in the same step -> what is subtracted from each.
        """
        ...

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
        """Measure the KL that the scaled and rounded update will realise; `attempt` counts earlier shrinks."""
        ...

    def snapshot(self, model: nn.Module, probe: Any) -> Any:
        """What `merged_kl` needs to know of the policy before the merge; None where the merge is not measured."""
        ...

    def merged_kl(self, model: nn.Module, probe: Any, snapshot: Any) -> float:
        """KL between the policy of `snapshot` and the merged one."""
        ...


@dataclass(frozen=True)
class StepView:
    """A step right before it is merged, as an observer sees it.

    Attributes:
        model: the model, weights as they are before the step.
        step: number of calls of `step()` before this one.
        gradients: by fully qualified name of the targets that ran: returns the gradient recovered from the sketch, as
            factors, averaged over processes and not clipped.
        update: returns target module -> the rounded change about to be merged.
        dense: other parameters that move in the same step -> what is subtracted from each; empty without a trust region,
            as their step is then not known before it is taken.
    """

    model: nn.Module
    step: int
    gradients: Mapping[str, Callable[[], Delta]]
    update: Callable[[], Mapping[nn.Module, Delta]]
    dense: Mapping[nn.Parameter, Tensor]


class StepObserver(Protocol):
    """Measures steps of an optimizer; must not change weights, gradients or the state of random number generators.

    In a run of several processes an observer of one alone sees whole gradients and updates, but must not communicate. The
    attribute `is_due` (bool, True without it) says before a step whether `observe` will ask for its gradients.
    """

    def attached(self, targets: Mapping[str, nn.Module]) -> None:
        """Called once, with the targets by fully qualified name. Raises ConfigError if they do not suit."""
        ...

    def detached(self) -> None:
        """The optimizer was detached from its model: leave nothing behind there."""
        ...

    def begin_window(self, step: int) -> None:
        """The gradient that accumulates from now on belongs to the step `step`; drop what the last window left."""
        ...

    def observe(self, view: StepView) -> dict[str, float]:
        """Numbers for `diagnostics()`. Not called for a step that is skipped."""
        ...
