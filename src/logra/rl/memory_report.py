"""memory.json of a run: bytes by category, with a profile also the peaks of every phase.

Every run records what is held between steps. With `profile` a ledger watches the whole training, which costs time (every
operation passes through Python).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from logra import distributed
from logra.memory import Ledger, profile
from logra.memory.categories import SHAPE_CALCULATION
from logra.rl.grpo import CheckedGRPOTrainer
from logra.rl.metrics import peak_memory_bytes


class MemoryReport(TrainerCallback):
    """Watches the memory of a training.

    Args:
        trainer: of the run.
        method: its name.
        with_ledger: record every tensor.
    """

    def __init__(self, trainer: CheckedGRPOTrainer, method: str, *, with_ledger: bool) -> None:
        self._trainer = trainer
        self._method = method
        self._ledger: Ledger | None = None
        self._with_ledger = with_ledger
        self._resident: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the training."""
        if not self._with_ledger:
            yield
            return
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        reference: Any = getattr(self._trainer, "ref_model", None)
        self._ledger = Ledger(policy, self._optimizer, reference_model=reference)
        with self._ledger:
            yield

    def _optimizer(self) -> Any:
        return getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the books of the step."""
        if self._ledger is not None:
            self._ledger.settle()
            return
        if state.global_step == 1 or state.global_step >= args.max_steps:
            policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
            reference: Any = getattr(self._trainer, "ref_model", None)
            self._resident = profile(policy, self._optimizer(), reference_model=reference)

    def content(self) -> dict[str, Any]:
        """What memory.json holds. With several processes: of the one with the highest peak; all must call it."""
        device = self._trainer.accelerator.device
        found: dict[str, Any] = {"method": self._method, "device": device.type, "profiled": self._ledger is not None}
        if self._ledger is None:
            found["resident"] = self._resident
        else:
            found |= self._ledger.report().to_dict()
            found["note"] = SHAPE_CALCULATION
        found["process_peak_bytes"] = peak_memory_bytes(device)
        if device.type == "cuda":
            found["allocator"] = {
                "allocated_peak_bytes": torch.cuda.max_memory_allocated(device),
                "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
            }
        if distributed.num_processes() == 1:
            return found
        gathered = distributed.gathered(found)
        key = "peak_bytes" if self._ledger is not None else "process_peak_bytes"
        rank = max(range(len(gathered)), key=lambda index: gathered[index][key])
        return gathered[rank] | {"rank": rank, "num_ranks": len(gathered)}
