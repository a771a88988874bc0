"""Callbacks of a run: they write and show every step, seed it, and stop the run between two steps."""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from logra import distributed
from logra.hashing import derive_key
from logra.rl.display import Display
from logra.rl.metrics import ROLLOUT_VERSION
from logra.rl.rewards import completion_text
from logra.rl.run_folder import RunFolder, finite

RENAMED = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "step_time", "epoch", "total_flos")
"""TRL's metrics that are logged under a name of logra's, or mean nothing here."""


_ECHO_S = 2.0
"""With several processes, a signal that comes so soon after the first is the same one."""


_KEPT_LOGS = 10
"""Entries that stay in transformers' history of logs, which would grow with every step; metrics.jsonl has all."""


_SOON = 3
"""Steps after which a run without a signal is told."""


NO_SIGNAL = (
    "all completions of a problem got the same reward, each time. Reward part of an answer too, take problems that the model "
    "solves sometimes, or raise --rollout.num-samples or --rollout.temperature"
)


class StepSummary:
    """What the results of a run say of its steps, in the memory of a few numbers."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.version = 0
        """Policy version after the last step."""
        self.peak_memory_bytes = 0
        """The most that one process held."""
        self.num_with_signal = 0
        """Steps in which the rewards of a group differed."""
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=3)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Count one step, with the metrics as they are in metrics.jsonl."""
        self.num_steps += 1
        self.version = int(metrics.get("sync/version") or 0)
        self.peak_memory_bytes = max(self.peak_memory_bytes, int(metrics.get("memory/peak_bytes") or 0))
        self.num_with_signal += metrics.get("reward/frac_zero_std") != 1
        reward = metrics.get("reward/mean")
        if reward is not None:
            if len(self._first) < 3:
                self._first.append(reward)
            self._last.append(reward)

    def mean_rewards(self) -> tuple[float | None, float | None]:
        """Of the first and of the last three steps that have one."""
        first, last = (math.fsum(values) / len(values) if values else None for values in (self._first, self._last))
        return first, last


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
        self.summary = StepSummary()

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
        metrics = finite(
            {"step": state.global_step} | {name: value for name, value in sorted(logs.items()) if name not in RENAMED}
        )
        self.summary.add(metrics)
        del state.log_history[:-_KEPT_LOGS]
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
        if self.summary.num_steps == _SOON < state.max_steps and not self.summary.num_with_signal:
            self._display.say(f"Warning: no step has had a signal yet: {NO_SIGNAL}")


class SeedEachStep(TrainerCallback):
    """Seeds the sampling of every step by its number, so that all methods draw with the same random numbers. Processes draw
    with numbers of their own.

    Args:
        seed: of the run.
        num_rollbacks: returns how often the run went back so far: after each time it draws with other numbers.
    """

    def __init__(self, seed: int, num_rollbacks: Callable[[], int] = lambda: 0) -> None:
        self._seed = seed
        self._num_rollbacks = num_rollbacks

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Seed torch's generators."""
        rollbacks, rank = self._num_rollbacks(), distributed.rank()
        of_process = [f"process {rank}"] if rank else []
        torch.manual_seed(
            derive_key("rollout", self._seed, state.global_step, *([rollbacks] if rollbacks else []), *of_process)
            % 2**63
        )


class StopOnInterrupt(TrainerCallback):
    """Ctrl-C or SIGTERM ends the run after the step that is running, so that no weight is left half updated; a second one
    ends it at once. Of several processes it suffices that one is asked: they agree at the end of every step.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, display: Display) -> None:
        self._display = display
        self._asked_at: float | None = None
        self.requested = False
        """Whether the run stops; the same on all processes."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop if asked to."""
        self.requested = self.requested or distributed.any_process([self._asked_at is not None])[0]
        if self.requested:
            control.should_training_stop = True

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside; only the main thread may, elsewhere Python's own handling stays."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if self._asked_at is not None:
            # Schedulers signal the launcher and its processes, and the launcher passes it on.
            if distributed.num_processes() > 1 and now - self._asked_at < _ECHO_S:
                return
            raise KeyboardInterrupt(f"a second {name}")
        self._asked_at = now
        self._display.say(f"{name}: stopping after this step. A second one stops at once.")
