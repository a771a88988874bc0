"""A run of `logra train`, from a configuration to a folder of results.

Order: whatever can be wrong with the folder, the task and the settings is found before the model is loaded; a run that is
to be replaced is removed when the trainer of the new one stands, and the configuration is written then; every step is on
disk when the next begins; the trained model is on disk before it is scored.
"""

import math
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from logra.errors import LograError
from logra.rl.config import TrainConfig
from logra.rl.display import Display, make_display
from logra.rl.metrics import peak_memory_bytes
from logra.rl.quiet import silence_libraries
from logra.rl.recorder import SeedEachStep, StepRecorder, StopOnInterrupt
from logra.rl.run_folder import RunFolder
from logra.rl.tasks import Task, load_task


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        folder: where its results lie.
        results: the content of results.json.
        interrupted: it was stopped before its last step.
    """

    folder: Path
    results: dict[str, Any]
    interrupted: bool


def train(config: TrainConfig, console: Console | None = None) -> Outcome:
    """Run the training that `config` describes, and write its results.

    Args:
        config: the run.
        console: where to show it; None shows it on standard output.

    Raises:
        ConfigError: the output folder is taken, or the model cannot be used.
        DataError: the task cannot be used, or a reward function returned something that cannot be trained on.
        KeyboardInterrupt: Ctrl-C outside of the training, with what is on disk as its message. (During the training
            it ends the run after the step, and a second one at once, without an error.)
    """
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    with warnings.catch_warnings():
        silence_libraries()
        task = _load_task(config)
        folder = RunFolder(config.output_dir, overwrite=config.overwrite)
        _require_inputs_outside(config, folder)
        try:
            return _Run(config, task, folder, make_display(config.run.num_steps, console)).execute()
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(folder.contents()) from interrupt


def _require_inputs_outside(config: TrainConfig, folder: RunFolder) -> None:
    """Refuse to replace a run by one that reads it."""
    for field, source in (("model", config.model), ("dataset", config.dataset), ("task", config.task)):
        if source is not None:
            folder.require_outside(field, source)


def _load_task(config: TrainConfig) -> Task:
    return load_task(
        config.task,
        options=config.task_options,
        dataset=config.dataset,
        num_heldout=config.num_heldout,
        num_prompts=config.rollout.num_prompts,
        num_steps=config.run.num_steps,
        seed=config.run.seed,
    )


class _Run:
    """One run and its parts."""

    def __init__(self, config: TrainConfig, task: Task, folder: RunFolder, display: Display) -> None:
        from logra.rl.memory_report import MemoryReport
        from logra.rl.methods import (
            build_diagnostics,
            build_trainer,
            load_model,
            publish_updates,
            texts_to_spare,
            training_set,
            trl_arguments,
        )

        self._config = config
        self._task = task
        self._folder = folder
        self._display = display
        arguments, dataset, texts = trl_arguments(config), training_set(task), texts_to_spare(config)
        display.say(f"Loading {config.model}")
        model, self._tokenizer = load_model(config, task)
        self._trainer = build_trainer(
            config,
            model,
            self._tokenizer,
            reward=task.reward,
            dataset=dataset,
            arguments=arguments,
            diagnostics=build_diagnostics(config, self._tokenizer, texts),
        )
        folder.create()
        folder.write_config(config)
        publish_updates(config, self._trainer, folder.updates)
        self._recorder = StepRecorder(folder, display, self._samples)
        self._stopper = StopOnInterrupt(display)
        self._memory = MemoryReport(self._trainer, config.method, with_ledger=config.profile)

    def execute(self) -> Outcome:
        """Evaluate, train, save, evaluate."""
        from logra.rl.methods import trained_policy

        self._introduce()
        before = self._score(self._trainer.model)
        if before is not None:
            self._display.say(f"Held-out {self._task.score_name} before: {before:.3f}")
        seconds, stopped_at_once = self._train(before)
        self._write_memory()
        results = self._results(before, None, seconds)
        if not stopped_at_once:
            policy = trained_policy(self._trainer)
            self._save(policy)
            self._folder.write_results(results)  # should the evaluation fail
            results = self._results(before, self._score(policy), seconds)
        self._folder.write_results(results)
        self._conclude(results, saved=not stopped_at_once)
        return Outcome(self._folder.path, results, self._stopper.requested)

    def _introduce(self) -> None:
        from logra.rl.methods import count_parameters

        counts = count_parameters(self._trainer)
        self._display.say(
            f"Method {self._config.method}: {counts['sketched']:,} parameters sketched, "
            f"{counts['dense']:,} trained densely, {counts['frozen']:,} frozen"
        )
        self._display.say(
            f"Task {self._task.name}: {len(self._task.train)} problems to train on, "
            f"{len(self._task.heldout)} others held out"
        )

    def _score(self, policy: Any) -> float | None:
        from logra.rl.evaluate import heldout_score

        return heldout_score(
            policy,
            self._tokenizer,
            self._task,
            max_new_tokens=self._config.rollout.max_new_tokens,
        )

    def _train(self, before: float | None) -> tuple[float, bool]:
        """Seconds of training, and whether it was stopped in the middle of a step.

        Args:
            before: held-out score, for the results of a training that fails.
        """
        from transformers import PrinterCallback

        self._trainer.remove_callback(PrinterCallback)
        for callback in (SeedEachStep(self._config.run.seed), self._recorder, self._stopper, self._memory):
            self._trainer.add_callback(callback)
        start = time.perf_counter()
        try:
            with self._stopper.installed(), self._display, self._memory.recording():
                self._trainer.train()
        except KeyboardInterrupt:
            self._stopper.requested = True
            return time.perf_counter() - start, True
        except Exception:
            self._stopper.requested = True
            with suppress(LograError):  # the first error is the one to report
                self._folder.write_results(self._results(before, None, time.perf_counter() - start))
            self._display.say(self._folder.contents())
            self._say_how_to_rebuild()
            raise
        return time.perf_counter() - start, False

    def _write_memory(self) -> None:
        from logra.memory.table import profile_text

        content = self._memory.content()
        self._folder.write_memory(content)
        if self._config.profile and content["phases"]:
            self._display.say(profile_text(self._config.method, content))

    def _samples(self) -> list[tuple[Any, Any, float]]:
        return self._trainer.spread_samples(self._config.run.num_logged_samples)

    def _save(self, policy: Any) -> None:
        def write(folder: Path) -> None:
            policy.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)

        self._folder.write_model(write)

    def _results(self, before: float | None, after: float | None, seconds: float) -> dict[str, Any]:
        rewards = [step["reward/mean"] for step in self._recorder.steps if step.get("reward/mean") is not None]
        num_steps = len(self._recorder.steps)
        return {
            "method": self._config.method,
            "num_steps": num_steps,
            "interrupted": self._stopper.requested,
            "heldout": {
                "score": self._task.score_name,
                "decoding": "greedy",
                "num_problems": len(self._task.heldout),
                "before": before,
                "after": after,
            },
            "mean_reward_first_3_steps": _mean(rewards[:3]),
            "mean_reward_last_3_steps": _mean(rewards[-3:]),
            "train_s": seconds,
            "seconds_per_step": seconds / num_steps if num_steps else None,
            "peak_memory_bytes": peak_memory_bytes(self._trainer.accelerator.device),
        }

    def _conclude(self, results: dict[str, Any], *, saved: bool) -> None:
        heldout = results["heldout"]
        if heldout["before"] is not None and heldout["after"] is not None:
            self._display.say(
                f"Held-out {heldout['score']} ({heldout['num_problems']} unseen problems, greedy): "
                f"{heldout['before']:.3f} before, {heldout['after']:.3f} after"
            )
        what = "Results and model" if saved else "Stopped in the middle of a step: no model was saved. Metrics"
        self._display.say(f"{what} lie in {self._folder.path}")
        if not saved:
            self._say_how_to_rebuild()

    def _say_how_to_rebuild(self) -> None:
        """Where there is a log of updates, the last step that ended is not lost."""
        version = int(self._recorder.steps[-1].get("sync/version", 0)) if self._recorder.steps else 0
        if version > 0:
            self._display.say(
                f"Weights of the last finished step: logra replay --run {self._folder.path} --step {version} --output OUT"
            )


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
