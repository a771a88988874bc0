"""`ProbedGRPOTrainer`: remembers the responses of a step, on which a trust region prices it.

What the trainers with a trust region share: the window of micro-batches behind the step, and the running mismatch between
the engine that samples and the trainer, which a checkpoint keeps.
"""

from typing import Any

from torch import nn

from logra.rl.guarded import GuardedGRPOTrainer
from logra.rl.probe_window import ProbeWindow


class ProbedGRPOTrainer(GuardedGRPOTrainer):
    """`GuardedGRPOTrainer` that collects the micro-batches of each step in `_window`.

    Args:
        *args, **kwargs: the arguments of `GuardedGRPOTrainer`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._window = ProbeWindow()
        self._mismatch: float | None = None

    def _own_state(self) -> dict[str, Any]:
        return super()._own_state() | {"mismatch": self._mismatch}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        self._mismatch = state["mismatch"]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss; remembers the micro-batch for the probe."""
        if self.model.training:
            self._window.add(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _on_step_begin(self) -> None:
        super()._on_step_begin()
        # An exception in an earlier train() can have left half a step behind.
        self._window.clear()

    def _on_step_end(self) -> None:
        super()._on_step_end()
        self._window.clear()
