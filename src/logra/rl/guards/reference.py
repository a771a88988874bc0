"""When the reference policy of the KL term is replaced by the current policy, and how.

A KL to a fixed reference holds a long run back for ever. Replacing the reference lets it go on from where it is
(ProRL, arXiv 2505.24864, resets the optimizer with it; its second version does not).
"""

from typing import Any

import torch
from torch import nn

from logra.errors import ConfigError
from logra.rl.guards.config import ReferenceReset


class ReferenceSchedule:
    """Decides after every step whether the reference is to be reset.

    Args:
        config: when.
    """

    def __init__(self, config: ReferenceReset) -> None:
        self._config = config
        self.last_reset_step = 0
        self.best_score: float | None = None
        self.num_stalled = 0

    def add_validation(self, score: float) -> None:
        """Take note of a held-out score."""
        if self.best_score is None or score > self.best_score:
            self.best_score, self.num_stalled = score, 0
        else:
            self.num_stalled += 1

    def reason(self, step: int, kl: float | None) -> tuple[str, float, float] | None:
        """Why to reset now: (name of the reason, value, threshold); None if there is none.

        Args:
            step: number of steps taken.
            kl: to the reference in this step, nats per generated token; None where it is not known.
        """
        config = self._config
        if config.kl_spike is not None and kl is not None and kl > config.kl_spike:
            return "kl_spike", kl, config.kl_spike
        if 0 < config.stalled_validations <= self.num_stalled:
            return "stalled_validation", float(self.num_stalled), float(config.stalled_validations)
        if 0 < config.every_steps <= step - self.last_reset_step:
            return "every_steps", float(step - self.last_reset_step), float(config.every_steps)
        return None

    def was_reset(self, step: int) -> None:
        """The reference was reset after `step`: counts begin anew (the best score stays the one to beat)."""
        self.last_reset_step, self.num_stalled = step, 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"last_reset_step": self.last_reset_step, "best_score": self.best_score, "num_stalled": self.num_stalled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.last_reset_step, self.best_score = state["last_reset_step"], state["best_score"]
        self.num_stalled = state["num_stalled"]


@torch.no_grad()
def copy_weights(policy: nn.Module, reference: nn.Module) -> None:
    """Give the reference the weights and buffers of the policy.

    Raises:
        ConfigError: they are not the same architecture.
    """
    for kind in ("named_parameters", "named_buffers"):
        source, target = dict(getattr(policy, kind)()), dict(getattr(reference, kind)())
        if source.keys() != target.keys():
            different = sorted(source.keys() ^ target.keys())[:3]
            raise ConfigError(f"guards.reference: policy and reference are different models ({', '.join(different)})")
        for name, value in target.items():
            value.copy_(source[name])
