"""Callbacks of the soak: one that breaks the optimizer for a while, one that reads memory and clock after every step."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

NUM_BROKEN = 20
"""Steps that a fault of the optimizer lasts."""
FAST = 0.5
"""Where in the run `lr` is ten times as large. The trust region shortens such a step to its budget."""
UNBOUND = 0.7
"""Where steps really are ten times as long: with a budget 100 times as large, as KL goes with the square."""


class Faults(TrainerCallback):
    """Multiplies `lr`, and the budget of the trust region.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._policy: Any = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Break or mend."""
        optimizer, step = self._trainer.sketch_optimizer, state.global_step
        fast, unbound = int(FAST * args.max_steps), int(UNBOUND * args.max_steps)
        if fast <= step < fast + NUM_BROKEN:
            for group in optimizer.param_groups:
                group["lr"] *= 10
        trust = optimizer.config.trust
        if step == unbound:
            self._policy = policy = trust.policy
            trust.policy = dataclasses.replace(
                policy, kl_budget=100 * policy.kl_budget, kl_budget_final=100 * policy.kl_budget_final, alpha_max=1e6
            )
        elif step == unbound + NUM_BROKEN:
            trust.policy = self._policy


class Monitor(TrainerCallback):
    """Resident memory and seconds of every step, also in a file that a run which is cut short leaves behind.

    Seconds are those that this process computed: what else runs on the machine does not make a step longer.

    Args:
        path: of the file; a line a step, seconds and bytes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.resident_bytes: list[int] = []
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock."""
        self._start = time.process_time()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The step is over, and on disk."""
        if state.global_step > len(self.seconds):
            self.seconds.append(time.process_time() - self._start)
            self.resident_bytes.append(resident_bytes())
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{self.seconds[-1]:.4f} {self.resident_bytes[-1]}\n")


def resident_bytes() -> int:
    """Resident set of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
