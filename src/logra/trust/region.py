"""How far a step may go: the KL budget, the step length it allows, and the check before the merge.

    alpha = min(alpha_max, sqrt(budget / predicted_kl))        the KL is quadratic in the step

`TrustRegion` implements `logra.contracts.TrustPolicy`. It holds settings only, no state: the budget of a step is a
function of the step number, and the current rollout/trainer mismatch is an argument.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from logra import distributed
from logra.contracts import Delta, TrustDecision, TrustVerdict
from logra.errors import ConfigError, NonFiniteProbeError, ProbeError
from logra.trust.lockstep import in_step
from logra.trust.measure import difference_kl, kl_since, predicted_kl, probe_logits, realised_kl
from logra.trust.probe import Probe, build_probe

logger = logging.getLogger(__name__)

# A shrunk step aims at 95 % of the budget: the KL of the next attempt differs a little from the quadratic law
# (curvature, and rounding of the factors drawn anew), and aiming at the budget itself would land above it half the time.
SHRINK_MARGIN = 0.95


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """Limits every update to a KL budget, predicted before and measured right before it is merged.

    Example:
        >>> region = TrustRegion(kl_budget=2e-4, kl_budget_final=2e-5, schedule_steps=300)
        >>> region.budget_at(0), region.budget_at(300)
        (0.0002, 2e-05)

    Source: budget, schedule, alpha_max and the mismatch correction: LoGRA, arXiv 2610.06647.
    """

    kl_budget: float = 2e-4
    """KL(old policy || new policy) allowed per update at step 0, nats per generated token, > 0."""
    kl_budget_final: float | None = None
    """Budget from `schedule_steps` on, nats per generated token, > 0. None: `kl_budget` throughout."""
    schedule_steps: int = 300
    """Updates over which the budget goes from `kl_budget` to `kl_budget_final` along half a cosine, >= 1."""
    alpha_max: float = 3.0
    """Most that a step may be lengthened, times the proposal (whose length is set by `lr`), > 0."""
    mismatch_correction: bool = True
    """Subtract the rollout/trainer mismatch from the budget, but never more than half of it."""
    on_violation: Literal["warn", "shrink", "reject"] = "shrink"
    """What to do when the realised KL exceeds `violation_ratio` times the budget: log a warning and take the step,
    shorten the step and measure again, or skip the step."""
    violation_ratio: float = 1.5
    """Realised KL over budget that still passes, >= 1."""
    max_shrinks: int = 3
    """With `on_violation="shrink"`: shorten at most this often, then reject, 0 to 20."""
    method: Literal["tangent", "difference"] = "tangent"
    """How the KL is predicted: a forward tangent, or the difference of two forwards at 1/128 of the step (for models
    that have an operation without a forward derivative)."""
    min_responses: int = 2
    """The probe draws at least this many responses, >= 1."""
    min_tokens: int = 128
    """The probe draws responses until it covers at least this many generated tokens, >= 1."""
    max_response_tokens: int = 4096
    """Generated tokens of one response that the probe looks at, >= 1."""
    measure_merged: bool = False
    """For debugging: measure the KL once more after the merge. Costs another forward, and the probe's logits are held on
    the CPU in fp32 meanwhile."""
    seed: int = 0
    """Draws the probe where `make_probe` is called without a generator."""

    def __post_init__(self) -> None:
        for name in ("kl_budget", "alpha_max"):
            _check_positive(name, getattr(self, name))
        if self.kl_budget_final is not None:
            _check_positive("kl_budget_final", self.kl_budget_final)
        _check_positive("violation_ratio", self.violation_ratio)
        if self.violation_ratio < 1:
            raise ConfigError(f"violation_ratio={self.violation_ratio!r}: a number >= 1 is allowed.")
        for name, least in (
            ("schedule_steps", 1),
            ("max_shrinks", 0),
            ("min_responses", 1),
            ("min_tokens", 1),
            ("max_response_tokens", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: an integer >= {least} is allowed.")
        if self.max_shrinks > 20:
            raise ConfigError(f"max_shrinks={self.max_shrinks!r}: an integer from 0 to 20 is allowed.")
        for name in ("mismatch_correction", "measure_merged"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: True or False is allowed.")
        for name, allowed in (("on_violation", ("warn", "shrink", "reject")), ("method", ("tangent", "difference"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: one of {', '.join(allowed)} is allowed.")

    def budget_at(self, step: int, mismatch: float = 0.0) -> float:
        """KL allowed for one update: final + (first - final) (1 + cos(pi min(step, S) / S)) / 2, less the mismatch.

        Args:
            step: number of updates taken before this one, >= 0.
            mismatch: rollout/trainer mismatch, nats per token (see `update_mismatch`); a negative value counts as 0.

        Returns:
            Nats per generated token, at least half of the scheduled budget.

        Raises:
            NonFiniteProbeError: `mismatch` is NaN or infinite.
        """
        final = self.kl_budget if self.kl_budget_final is None else self.kl_budget_final
        progress = min(max(step, 0), self.schedule_steps) / self.schedule_steps
        budget = final + (self.kl_budget - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        if not self.mismatch_correction:
            return budget
        if not math.isfinite(mismatch):
            raise NonFiniteProbeError(f"mismatch={mismatch!r}: a finite number of nats per token is needed.")
        return max(budget - max(mismatch, 0.0), 0.5 * budget)

    def make_probe(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Probe:
        """Draw the responses to measure on.

        Args:
            input_ids: integer [batch, tokens], prompt and response, padded on any side.
            attention_mask: [batch, tokens], 1 at real tokens.
            loss_mask: [batch, tokens], 1 at generated tokens (predicted by the logits one column before).
            temperature: sampling temperature of the rollouts, > 0.
            generator: CPU generator that draws the responses; None draws from `seed`, the same rows each time.

        Returns:
            The probe, copied from the tensors, on their device.

        Raises:
            ProbeError: shapes that differ, no generated token, a generated token that is masked out or has no
                predecessor, a bad temperature.
        """
        return build_probe(
            input_ids,
            attention_mask,
            loss_mask,
            temperature=temperature,
            min_responses=self.min_responses,
            min_tokens=self.min_tokens,
            max_response_tokens=self.max_response_tokens,
            generator=torch.Generator().manual_seed(self.seed) if generator is None else generator,
        )

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
        """Predict the KL of the whole proposal and answer with the scale that the budget allows.

        Args:
            model: the policy, on the probe's device, weights as they are before the update.
            probe: from `make_probe`; None on a process without generated tokens, which takes the others' word.
            deltas: target module -> proposed change.
            step: number of updates taken before this one.
            mismatch: current rollout/trainer mismatch, nats per token.
            dense: other parameters that move in the same step -> what is subtracted from each, of its shape.

        Returns:
            alpha, the predicted KL of the unscaled proposal and the budget of this step (mismatch subtracted).

        Raises:
            ProbeError: no deltas, all deltas zero, a lost tangent, a model without a forward derivative.
            NonFiniteProbeError: logits, KL or mismatch not finite.
        """
        if not deltas and not dense:
            raise ProbeError("deltas is empty: there is no update to price.")
        budget = self.budget_at(step, distributed.mean(mismatch))
        measure = predicted_kl if self.method == "tangent" else difference_kl
        predicted = _mean_over_processes(model, probe, lambda own: measure(model, own, deltas, dense))
        alpha = self.alpha_max if predicted == 0 else min(self.alpha_max, math.sqrt(budget / predicted))
        return TrustDecision(alpha=alpha, predicted_kl=predicted, budget=budget)

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
        """Measure the KL of the scaled, rounded update before it is merged, and accept, shrink or reject it.

        A step that is too long is to be multiplied by 0.95 sqrt(budget / realised): the KL is close to quadratic in the
        step, so the square root lands on the budget, and the 5 % keep the next attempt from landing just above it.

        Args:
            model: the policy, weights as they are before the update.
            probe: from `make_probe`; None on a process without generated tokens, which takes the others' word.
            deltas: target module -> the change about to be merged.
            budget: of this step, from the decision of `predict`.
            attempt: number of shrinks so far.
            dense: other parameters that move in the same step -> what is subtracted from each, of its shape.

        Raises:
            ProbeError: no target module ran.
            NonFiniteProbeError: logits or KL not finite.
        """
        realised = _mean_over_processes(model, probe, lambda own: realised_kl(model, own, deltas, dense))
        if realised <= self.violation_ratio * budget:
            return TrustVerdict(realised_kl=realised, action="accept")
        if self.on_violation == "warn":
            logger.warning(
                "realised KL %.3g exceeds %.3g times the budget %.3g; the step is taken", realised,
                self.violation_ratio, budget,
            )  # fmt: skip
            return TrustVerdict(realised_kl=realised, action="accept")
        if self.on_violation == "reject" or attempt >= self.max_shrinks:
            return TrustVerdict(realised_kl=realised, action="reject")
        return TrustVerdict(realised_kl=realised, action="shrink", factor=SHRINK_MARGIN * math.sqrt(budget / realised))

    def snapshot(self, model: nn.Module, probe: Any) -> list[Tensor] | None:
        """Logits of the policy before the merge, fp32 on the CPU, where `measure_merged` asks for them.

        Args:
            model: the policy, weights as they are before the update.
            probe: from `make_probe`; None on a process without generated tokens.
        """
        if not self.measure_merged:
            return None
        to_run = in_step(model, probe)
        return [] if to_run is None else probe_logits(model, to_run)

    def merged_kl(self, model: nn.Module, probe: Any, snapshot: list[Tensor]) -> float:
        """KL between the policy of `snapshot` and the merged one: what `verify` foretold, with the merge's rounding.

        Raises:
            NonFiniteProbeError: logits or KL not finite.
        """
        return _mean_over_processes(model, probe, lambda own: kl_since(model, own, snapshot))


def update_mismatch(
    average: float | None, rollout_logps: Tensor, trainer_logps: Tensor, loss_mask: Tensor, *, weight: float = 0.3
) -> float:
    """Running mismatch between the engine that sampled and the trainer: EMA of mean(log q_rollout - log p_trainer).

    The tokens were drawn from q, so the mean estimates KL(q || p); it is part of the distance between the policy that
    generates and the one that is trained, and `TrustRegion` takes it off the budget.

    Args:
        average: the value so far, nats per token; None at the first batch, whose mean is then taken as it is.
        rollout_logps: [batch, tokens], log-probabilities reported by the rollout engine, nats.
        trainer_logps: [batch, tokens], log-probabilities of the same tokens under the trainer's weights, nats.
        loss_mask: [batch, tokens], 1 at generated tokens.
        weight: of the new batch, in (0, 1].

    Returns:
        max(0, (1 - weight) average + weight mean), nats per token.

    Raises:
        ProbeError: shapes that differ or no generated token.
        NonFiniteProbeError: the mean is NaN or infinite.
    """
    if not rollout_logps.shape == trainer_logps.shape == loss_mask.shape:
        shapes = [tuple(tensor.shape) for tensor in (rollout_logps, trainer_logps, loss_mask)]
        raise ProbeError(f"rollout_logps, trainer_logps and loss_mask must have one shape, not {shapes}.")
    generated = loss_mask.bool()
    if not generated.any():
        raise ProbeError("loss_mask has no 1: the mismatch needs at least one generated token.")
    mean = (rollout_logps.float() - trainer_logps.float())[generated].mean().item()
    if not math.isfinite(mean):
        raise NonFiniteProbeError(f"mean(rollout_logps - trainer_logps)={mean!r}: a finite number is needed.")
    return max(0.0, mean if average is None else (1.0 - weight) * average + weight * mean)


def _mean_over_processes(model: nn.Module, probe: Any, measure: Callable[[Any], float]) -> float:
    """The KL on this process's probe, averaged over the processes that have one.

    Errors are raised on all processes together: one that raised alone would leave the others waiting for it.
    """
    if distributed.num_processes() == 1:
        return measure(probe)
    kl, error = 0.0, None
    to_run = in_step(model, probe)
    if to_run is not None:
        try:
            kl = measure(to_run)
        except NonFiniteProbeError:
            kl = math.nan
        except ProbeError as probe_error:
            error = probe_error
    failed, measured = distributed.any_process([error is not None, probe is not None])
    if failed:
        raise error or ProbeError("the probe of another process failed.")
    if not measured:
        raise ProbeError("no process has a probe to measure on.")
    kl = distributed.mean(kl, weight=float(probe is not None))
    if not math.isfinite(kl):
        raise NonFiniteProbeError(f"the KL of the proposed update is {kl} on at least one process.")
    return kl


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value!r}: a finite number > 0 is allowed.")
