"""Configuration of the guards of a long run. Imports no machine-learning library.

Every guard is off, or only warns, unless it is asked for: with the defaults a run computes what it computes without them.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from logra.rl.checks import require, require_choices, require_integer, require_number

Action = Literal["off", "warn", "skip", "rollback", "stop"]
STRENGTH: tuple[str, ...] = ("off", "warn", "skip", "rollback", "stop")
"""Actions from weak to strong; the strongest of a step is taken."""
AFTER_THE_MERGE = ("realised_kl", "prediction_error", "update_norm")
"""Sentinels of what a step has done to the weights: it can no longer be skipped."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a sentinel speaks, and what is done then."""

    threshold: float
    """The value from which on (for a floor: below which) it speaks."""
    action: Action = "warn"
    """off; warn; skip the step; rollback to the last good version; stop the run after the step."""


@dataclass(frozen=True, kw_only=True)
class Sentinels:
    """Thresholds on the metrics of a run, see `logra.rl.guards.sentinels`."""

    entropy_floor: Rule = Rule(threshold=0.01)
    """Entropy of the policy, nats per generated token, lies below the threshold."""
    reference_kl: Rule = Rule(threshold=1.0)
    """KL to the reference policy, nats per generated token (with loss.beta above 0)."""
    realised_kl: Rule = Rule(threshold=2.0)
    """KL that the step realised, over its budget."""
    length_jump: Rule = Rule(threshold=3.0)
    """Mean completion length over its median in the window, or the inverse."""
    truncation: Rule = Rule(threshold=1.0)
    """Share of completions that reached the longest allowed length."""
    repetition: Rule = Rule(threshold=0.5)
    """Mean share of 4-token sequences of a completion that occurred in it before."""
    effective_samples: Rule = Rule(threshold=0.3)
    """Effective sample size of the tokens over their number, where an external engine samples, lies below it."""
    reward_drop: Rule = Rule(threshold=4.0)
    """Mean reward of the last 5 steps below its mean in the window, in standard deviations of the steps there."""
    prediction_error: Rule = Rule(threshold=4.0)
    """Realised KL over the predicted one, or the inverse."""
    filtered: Rule = Rule(threshold=0.999)
    """Share of completions that were filtered (no signal, bad reward, truncated) in each of the last 5 steps."""
    update_norm: Rule = Rule(threshold=10.0)
    """Relative length of the step, ‖ΔW‖/‖W‖, over its median in the window."""
    window: int = 100
    """Steps of history that a value is compared with."""
    min_history: int = 20
    """Steps of history before a sentinel that compares with it speaks."""

    def __post_init__(self) -> None:
        require_integer("guards.sentinels.window", self.window, 10, "steps")
        require_integer("guards.sentinels.min_history", self.min_history, 6, "steps")
        require(self.min_history <= self.window, "guards.sentinels.min_history", self.min_history, "at most the window")
        for name, rule in self.rules().items():
            prefix = f"guards.sentinels.{name}"
            require_number(f"{prefix}.threshold", rule.threshold)
            require_choices(rule, f"{prefix}.")
            require(
                rule.action != "skip" or name not in AFTER_THE_MERGE,
                f"{prefix}.action",
                rule.action,
                "off, warn, rollback or stop: it is known after the merge only. trust.on_violation=reject refuses a step "
                "before it",
            )

    def rules(self) -> dict[str, Rule]:
        """The rules by name, those that are off as well."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Rule)}


@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """Cosine penalty on long completions, switched on for a part of every cycle, see `guards.length_penalty`."""

    weight: float = 0.0
    """Taken off the reward of a completion of the longest allowed length; 0 is off."""
    cycle_steps: int = 200
    """Length of a cycle, steps."""
    on_steps: int = 100
    """Steps at the end of a cycle in which the penalty holds."""

    def __post_init__(self) -> None:
        prefix = "guards.length_penalty"
        require_number(f"{prefix}.weight", self.weight)
        require_integer(f"{prefix}.cycle_steps", self.cycle_steps, 1, "steps")
        require_integer(f"{prefix}.on_steps", self.on_steps, 1, "steps")
        require(self.on_steps <= self.cycle_steps, f"{prefix}.on_steps", self.on_steps, "at most cycle_steps")


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """The estimator behind loss.beta, see `logra.rl.guards.kl`."""

    estimator: Literal["k2", "k3"] = "k3"
    """k2: half of the squared log-ratio. k3: ratio - 1 - log-ratio, whose expectation is the KL."""
    clamp: float = 10.0
    """Largest log-ratio, either sign, nats; a token beyond it pulls with the force that it has there."""
    importance: bool = True
    """k3 only: weight with the probability ratio, which makes its gradient that of KL(policy || reference)."""

    def __post_init__(self) -> None:
        require_choices(self, "guards.kl.")
        require_number("guards.kl.clamp", self.clamp, above=0)


@dataclass(frozen=True, kw_only=True)
class ReferenceReset:
    """When the reference policy becomes the current policy (with loss.beta above 0)."""

    every_steps: int = 0
    """After so many steps without a reset; 0 never."""
    kl_spike: float | None = None
    """When the KL to the reference exceeds this, nats per generated token; null never."""
    stalled_validations: int = 0
    """After so many validations in a row that did not beat the best one; 0 never. Needs guards.validate_every."""
    reset_optimizer: bool = False
    """Forget the optimizer's moments with every reset."""

    def __post_init__(self) -> None:
        prefix = "guards.reference"
        require_integer(f"{prefix}.every_steps", self.every_steps, 0, "steps")
        require_integer(f"{prefix}.stalled_validations", self.stalled_validations, 0, "validations")
        if self.kl_spike is not None:
            require_number(f"{prefix}.kl_spike", self.kl_spike, above=0)

    @property
    def is_on(self) -> bool:
        """Whether anything can reset the reference."""
        return self.every_steps > 0 or self.kl_spike is not None or self.stalled_validations > 0


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """How a run goes back, see `logra.rl.guards.rollback`."""

    lag: int = 10
    """The good version is at least so many steps older than the one at which a sentinel spoke."""
    budget_factor: float = 0.5
    """The KL budget (without a trust region: the learning rate) is multiplied by this at every rollback."""
    max_rollbacks: int = 5
    """The run is stopped instead of going back more often than this."""

    def __post_init__(self) -> None:
        require_integer("guards.rollback.lag", self.lag, 1, "steps")
        require_integer("guards.rollback.max_rollbacks", self.max_rollbacks, 1)
        require_number("guards.rollback.budget_factor", self.budget_factor, above=0)
        require(self.budget_factor <= 1, "guards.rollback.budget_factor", self.budget_factor, "at most 1")


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """What watches over a long run, see docs/long-runs.md."""

    on_bad_reward: Literal["error", "drop"] = "error"
    """A reward that is NaN or infinite ends the run, or drops the group of its completion (counted)."""
    resample: bool = False
    """Replace groups without signal by groups of other prompts until the step is full."""
    max_resampled_batches: int = 10
    """Batches that are sampled anew for one step before the run ends with an error that says why."""
    validate_every: int = 0
    """Steps between two held-out scores during the training; 0 never."""
    length_penalty: LengthPenalty = field(default_factory=LengthPenalty)
    kl: KLPenalty = field(default_factory=KLPenalty)
    reference: ReferenceReset = field(default_factory=ReferenceReset)
    rollback: Rollback = field(default_factory=Rollback)
    sentinels: Sentinels = field(default_factory=Sentinels)

    def __post_init__(self) -> None:
        require_choices(self, "guards.")
        require_integer("guards.max_resampled_batches", self.max_resampled_batches, 1, "batches")
        require_integer("guards.validate_every", self.validate_every, 0, "steps")
        require(
            self.reference.stalled_validations == 0 or self.validate_every > 0,
            "guards.reference.stalled_validations",
            self.reference.stalled_validations,
            "needs validations: set guards.validate_every above 0",
        )

    @property
    def may_roll_back(self) -> bool:
        """Whether a sentinel asks for a rollback."""
        return any(rule.action == "rollback" for rule in self.sentinels.rules().values())
