"""Callbacks of a run: they write and show every step, seed it, and stop the run between two steps."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from logra.hashing import derive_key
from logra.rl.display import Display
from logra.rl.metrics import ROLLOUT_VERSION
from logra.rl.rewards import completion_text
from logra.rl.run_folder import RunFolder

RENAMED = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "step_time", "epoch", "total_flos")
"""TRL's metrics that are logged under a name of logra's, or mean nothing here."""


class StepRecorder(TrainerCallback):
    """Writes metrics and samples of every step, and shows the step.

    Args:
        folder: of the run.
        display: of the run.
        take_samples: returns completions of the last rollout as (prompt, completion, reward).
    """

    def __init__(
        self, folder: RunFolder, display: Display, take_samples: Callable[[], list[tuple[Any, Any, float]]]
    ) -> None:
        self._folder = folder
        self._display = display
        self._take_samples = take_samples
        self.steps: list[dict[str, Any]] = []

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Record a step; the summary that transformers logs at the end has no loss and is left out."""
        if logs is None or "loss" not in logs:
            return
        metrics = {"step": state.global_step} | {
            name: value for name, value in sorted(logs.items()) if name not in RENAMED
        }
        self.steps.append(metrics)
        self._folder.add_metrics(metrics)
        # Baselines have no policy versions.
        version = {"policy_version": int(metrics[ROLLOUT_VERSION])} if ROLLOUT_VERSION in metrics else {}
        for prompt, completion, reward in self._take_samples():
            self._folder.add_sample(
                {
                    "step": state.global_step,
                    **version,
                    "prompt": prompt,
                    "completion": completion_text(completion),
                    "reward": None if math.isnan(reward) else reward,
                }
            )
        self._display.add_step(metrics)


class SeedEachStep(TrainerCallback):
    """Seeds the sampling of every step by its number, so that all methods draw with the same random numbers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Seed torch's generators."""
        torch.manual_seed(derive_key("rollout", self._seed, state.global_step) % 2**63)


class StopOnInterrupt(TrainerCallback):
    """Ctrl-C ends the run after the step that is running, so that no weight is left half updated; twice, at once."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.requested = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop if asked to."""
        if self.requested:
            control.should_training_stop = True

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT inside; only the main thread may, elsewhere Python's own handling stays."""
        try:
            previous = signal.signal(signal.SIGINT, self._on_signal)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._display.say("Interrupted: stopping after this step. Press Ctrl-C again to stop at once.")
