"""`PricedGRPOTrainer`: a baseline, every step of its optimizer priced by a trust region and scaled to its KL budget.

For comparisons with sketches at an equal KL per step. The KL, the scale and their names in the metrics are those of
`GRPOTrainer`. Single process.
"""

from typing import Any

import torch
from torch import nn

from logra.contracts import TrustPolicy
from logra.errors import ConfigError
from logra.rl.metrics import optimizer_metrics
from logra.rl.priced_step import PricedStep
from logra.rl.probe_window import TimedTrust
from logra.rl.probed import ProbedGRPOTrainer


class PricedGRPOTrainer(ProbedGRPOTrainer):
    """`GuardedGRPOTrainer` with a trust region around the step of TRL's optimizer.

    Args:
        *args, **kwargs: the arguments of `GuardedGRPOTrainer`.
        trust: prices and scales every step.

    Raises:
        ConfigError: several processes, whose wrapped parameters cannot be moved on trial.
    """

    def __init__(self, *args: Any, trust: TrustPolicy, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.accelerator.num_processes > 1:
            raise ConfigError("a trust region around a dense optimizer needs a single process")
        self._timed = TimedTrust(trust)
        self._priced: PricedStep | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """TRL's optimizer, its step under the trust region."""
        optimizer = super().create_optimizer(model)
        if self._priced is None:
            # LoRA's adapters sit inside the base model, whose head and backbone the probe needs to tell apart.
            self._priced = PricedStep(optimizer, self._language_model, self._timed)
        return optimizer

    def _own_state(self) -> dict[str, Any]:
        assert self._priced is not None
        return super()._own_state() | {"priced": self._priced.state_dict()}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        assert self._priced is not None
        super()._load_own_state(state)
        self._priced.load_state_dict(state["priced"])

    def _on_pre_optimizer_step(self) -> None:
        super()._on_pre_optimizer_step()
        self._timed.reset()
        self._mismatch = self._window.mismatch(self._mismatch)
        tensors = self._window.tensors()
        if self._priced is not None and tensors["loss_mask"].any():
            # Also without any advantage: AdamW's momentum moves the weights all the same.
            self._priced.set_probe(**tensors, temperature=self.temperature, mismatch=self._mismatch or 0.0)

    def _on_optimizer_step(self) -> None:
        if self._priced is not None:
            skipped = {"optim/skipped": float(self._priced.num_skipped), "time/probe_s": self._timed.seconds}
            self._record(optimizer_metrics(self._priced.diagnostics) | skipped)
