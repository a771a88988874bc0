"""A run of `logra train`, from a configuration to a folder of results.

Order: whatever can be wrong with the folder, the task and the settings is found before the model is loaded; a run that is
to be replaced is removed when the trainer of the new one stands on all processes and its reward has scored completions, and
the configuration is written then; a run that is continued is changed after all of it was read and checked; every step is on
disk when the next begins, and checkpoints are written last of all; the trained model is on disk before it is scored.

Under torchrun every process runs this on its part of the prompts, and process 0 alone writes and shows (`rl.processes`).
"""

import dataclasses
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from logra import distributed
from logra.checkpoint import CheckpointStore
from logra.errors import LograError
from logra.rl import processes
from logra.rl.config import TrainConfig
from logra.rl.display import Display, make_display
from logra.rl.event_recorder import EventRecorder
from logra.rl.followed_folder import FollowedFolder
from logra.rl.metrics import peak_memory_bytes
from logra.rl.quiet import silence_libraries
from logra.rl.recorder import NO_SIGNAL, SeedEachStep, StepRecorder, StopOnInterrupt
from logra.rl.run_folder import RunFolder
from logra.rl.tasks import Task, load_task


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        folder: where its results lie.
        results: the content of results.json.
        interrupted: it was stopped before its last step.
        leads: this process is the one that wrote them.
    """

    folder: Path
    results: dict[str, Any]
    interrupted: bool
    leads: bool = True


def train(config: TrainConfig, console: Console | None = None) -> Outcome:
    """Run the training that `config` describes, and write its results.

    Args:
        config: the run.
        console: where to show it; None shows it on standard output. Process 0 shows it.

    Raises:
        ConfigError: the output folder is taken, or the model cannot be used.
        OtherProcessError: another process of the run met an error first.
        DataError: the task cannot be used, or a reward function returned something that cannot be trained on.
        KeyboardInterrupt: Ctrl-C outside of the training, with what is on disk as its message. (During the training
            it ends the run after the step, and a second one at once, without an error.)
    """
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    with warnings.catch_warnings():
        silence_libraries()
        with processes.joined(config):
            return _train_joined(config, console)


def _train_joined(config: TrainConfig, console: Console | None) -> Outcome:
    task = _load_task(config)
    if distributed.rank() == 0:
        folder = RunFolder(config.output_dir, overwrite=config.overwrite, resume=config.resume is not None)
    else:
        folder, console = FollowedFolder(config.output_dir), Console(quiet=True, force_terminal=False)
    _require_inputs_outside(config, folder)
    with folder.locked():
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
        from logra.rl.checkpoints import SaveCheckpoints
        from logra.rl.memory_report import MemoryReport
        from logra.rl.methods import (
            build_diagnostics,
            build_trainer,
            load_model,
            texts_to_spare,
            training_set,
            trl_arguments,
        )
        from logra.rl.resume import find_origin, rows_digest

        self._config = config
        self._task = task
        self._folder = folder
        self._display = display
        arguments, dataset, texts = trl_arguments(config), training_set(task), texts_to_spare(config)
        settings = config.checkpoints
        self._store = store = CheckpointStore(folder.checkpoints, keep=settings.keep, max_bytes=settings.max_bytes)
        self._origin = find_origin(config, folder, store, task)
        display.say(f"Loading {config.model}")
        model, self._tokenizer = load_model(config, task)
        parameters = dict(model.named_parameters())  # without the adapters that LoRA adds
        self._trainer = build_trainer(
            config,
            model,
            self._tokenizer,
            reward=task.reward,
            dataset=dataset,
            arguments=arguments,
            diagnostics=build_diagnostics(config, self._tokenizer, texts),
        )
        self._require_space()
        self._recorder = StepRecorder(folder, display, self._samples)
        self._stopper = StopOnInterrupt(display)
        self._memory = MemoryReport(self._trainer, config.method, with_ledger=config.profile)
        if self._trainer.guards is not None:
            self._trainer.guards.subscribe(EventRecorder(folder, display))
        self._trainer.validate = lambda: self._score(self._trainer.model)
        self._seconds = self._origin.run.get("train_s", 0.0)
        self._before: float | None = None
        self._num_left_out: int = self._origin.run.get("heldout_left_out", 0)
        self._start = time.perf_counter()
        self._rows = rows_digest(task)
        self._saver = None
        if settings.every:
            self._saver = SaveCheckpoints(
                self._trainer,
                store,
                every=settings.every,
                run_state=self._run_state,
                stop_requested=lambda: self._stopper.requested,
                say=display.say,
            )
        processes.require_same_weights(config.model, parameters)

    def _begin(self) -> None:
        """Make the folder that of this run: a new one, or the one that lies there, as it was at the checkpoint."""
        from logra.rl.methods import publish_updates

        origin, folder = self._origin, self._folder
        for note in origin.notes:
            self._display.say(note)
        if not origin.continues:
            folder.create()
            folder.write_config(self._config)
        publish_updates(self._config, self._trainer, folder.updates, resumed=origin.continues, say=self._display.say)
        if origin.continues:
            self._reopen()
        if origin.state is not None:
            self._trainer.resume_from(origin.state)

    def _reopen(self) -> None:
        """Continue the run that lies here. Nothing of it is changed before the last check has passed."""
        from logra.rl.resume import require_log, set_aside_later

        origin, folder = self._origin, self._folder
        positions = origin.run.get("positions", dict.fromkeys(folder.positions(), 0))
        require_log(self._trainer, folder, origin.run.get("version", 0))
        if origin.state is not None:
            self._trainer.require_same_base(origin.state)
        for step in folder.steps(positions):
            self._recorder.summary.add(step)
        for note in set_aside_later(self._config, self._store, origin):
            self._display.say(note)
        folder.write_config(self._config)
        for name in folder.reopen(positions):
            self._display.say(
                f"Warning: {name} is shorter than it was: steps before the checkpoint are missing from it"
            )

    def _require_space(self) -> None:
        from logra.rl.checkpoints import estimated_bytes

        kept = self._config.checkpoints.keep + 1 if self._config.checkpoints.every else 0
        model: Any = self._trainer.model
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        self._folder.require_space(weights + kept * estimated_bytes(self._trainer))

    def _run_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the trainer's state."""
        return {
            "rows_sha256": self._rows,
            "num_processes": distributed.num_processes(),
            "positions": self._folder.positions(),
            "version": getattr(getattr(self._trainer, "sketch_optimizer", None), "version", 0),
            "heldout_before": self._before,
            "heldout_left_out": self._num_left_out,
            "train_s": self._seconds + time.perf_counter() - self._start,
        }

    def execute(self) -> Outcome:
        """Evaluate, train, save, evaluate."""
        from logra.rl.methods import trained_policy

        self._introduce()
        if self._origin.state is not None:
            self._before = self._origin.run["heldout_before"]
        elif self._task.heldout:
            self._before = self._score(self._trainer.model)
        elif self._config.overwrite:
            self._try_reward()
        self._begin()
        if self._before is not None:
            self._display.say(f"Held-out {self._task.score_name} before: {self._before:.3f}")
        stopped_at_once = self._train()
        if not stopped_at_once or distributed.num_processes() == 1:  # the others may be gone
            self._write_memory()
        results = self._results(None)
        if not stopped_at_once:
            policy = trained_policy(self._trainer)
            self._save(policy)
            self._folder.write_results(results)  # should the evaluation fail
            if not self._stopper.requested:
                results = self._results(self._score(policy))
        self._folder.write_results(results)
        self._conclude(results, saved=not stopped_at_once)
        return Outcome(self._folder.path, results, self._stopper.requested, distributed.rank() == 0)

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

    def _score(self, policy: Any, task: Task | None = None) -> float | None:
        from logra.rl.evaluate import heldout_score

        return heldout_score(
            policy,
            self._tokenizer,
            self._task if task is None else task,
            max_new_tokens=self._config.rollout.max_new_tokens,
            on_bad=self._leave_out if self._config.guards.on_bad_reward == "drop" else None,
        )

    def _leave_out(self, num_bad: int) -> None:
        self._num_left_out += num_bad
        self._display.say(
            f"Warning: rewards of held-out completions that are NaN or infinite: {num_bad}, left out of the score "
            f"(guards.on_bad_reward=drop)"
        )

    def _try_reward(self) -> None:
        """Score one completion where nothing is held out: a reward that fails must not cost the run that lies here."""
        self._score(self._trainer.model, dataclasses.replace(self._task, heldout=self._task.train[:1]))

    def _train(self) -> bool:
        """Train to the end, or until asked to stop. Returns whether it was stopped in the middle of a step."""
        from transformers import PrinterCallback

        from logra.rl.trainer import GRPOTrainer

        self._trainer.remove_callback(PrinterCallback)
        guards = self._trainer.guards
        seeds = SeedEachStep(self._config.run.seed, lambda: 0 if guards is None else guards.num_rollbacks)
        for callback in (seeds, self._recorder, self._stopper, self._memory, self._saver):
            if callback is not None:
                self._trainer.add_callback(callback)
        self._start = time.perf_counter()
        try:
            with self._stopper.installed(), self._display, self._memory.recording():
                self._run_steps()
        except KeyboardInterrupt as interrupt:
            processes.announce(interrupt)
            self._stopper.requested = True
            return True
        except Exception:
            self._stopper.requested = True
            with suppress(LograError):  # the first error is the one to report
                self._folder.write_results(self._results(None))
            self._display.say(self._folder.contents())
            self._say_how_to_go_on()
            raise
        finally:
            self._seconds += time.perf_counter() - self._start
            if isinstance(self._trainer, GRPOTrainer):
                self._trainer.close()
        return False

    def _run_steps(self) -> None:
        checkpoint, state = self._origin.checkpoint, self._origin.state
        if checkpoint is None or state is None:
            self._trainer.train()
        elif checkpoint.step < self._config.run.num_steps:
            self._trainer.train(resume_from_checkpoint=str(checkpoint.path))
        else:
            self._trainer.load_policy(state)

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

    def _results(self, after: float | None) -> dict[str, Any]:
        summary = self._recorder.summary
        first, last = summary.mean_rewards()
        num_steps = summary.num_steps
        return {
            "method": self._config.method,
            "num_steps": num_steps,
            "interrupted": self._stopper.requested,
            "guards": self._guard_results(),
            "heldout": {
                "score": self._task.score_name,
                "decoding": "greedy",
                "num_problems": len(self._task.heldout),
                "before": self._before,
                "after": after,
                "num_left_out": self._num_left_out,  # bad rewards, over all scores
            },
            "mean_reward_first_3_steps": first,
            "mean_reward_last_3_steps": last,
            "train_s": self._seconds,
            "seconds_per_step": self._seconds / num_steps if num_steps else None,
            "peak_memory_bytes": max(summary.peak_memory_bytes, peak_memory_bytes(self._trainer.accelerator.device)),
        }

    def _guard_results(self) -> dict[str, Any]:
        """What a claim about the run has to say: rollbacks, whether a guard ended it, and events by kind."""
        guards = self._trainer.guards
        assert guards is not None
        return {
            "rollbacks": guards.num_rollbacks,
            "stopped_by_guard": self._trainer.wants_to_stop,
            "events": dict(sorted(guards.counts.items())),
        }

    def _conclude(self, results: dict[str, Any], *, saved: bool) -> None:
        heldout, summary = results["heldout"], self._recorder.summary
        if summary.num_steps and not summary.num_with_signal:
            self._display.say(f"No step had a signal: {NO_SIGNAL}")
        if heldout["before"] is not None and heldout["after"] is not None:
            self._display.say(
                f"Held-out {heldout['score']} ({heldout['num_problems']} unseen problems, greedy): "
                f"{heldout['before']:.3f} before, {heldout['after']:.3f} after"
            )
        what = "Results and model" if saved else "Stopped in the middle of a step: no model was saved. Metrics"
        self._display.say(f"{what} lie in {self._folder.path}")
        if self._stopper.requested:
            self._say_how_to_go_on()

    def _say_how_to_go_on(self) -> None:
        """Where there is a checkpoint the run can go on; where there is a log the last step that ended is not lost."""
        saved = self._saver.last if self._saver is not None else None
        checkpoint = saved or self._origin.checkpoint
        if checkpoint is not None:
            self._display.say(
                f"The checkpoint of step {checkpoint.step} is in {checkpoint.path}: the same command with --resume auto "
                f"goes on from there"
            )
        if self._recorder.summary.version > 0:
            self._display.say(
                f"Weights of the last finished step: logra replay --run {self._folder.path} "
                f"--step {self._recorder.summary.version} --output OUT"
            )
