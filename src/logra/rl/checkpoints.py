"""The checkpoints of a run: when one is written, how a run continues from one, and how a living one returns to one."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from logra import distributed
from logra.checkpoint import Checkpoint, CheckpointStore
from logra.errors import CheckpointError
from logra.optim import SketchOptimizer
from logra.rl.resumable import TRAINER_STATE, ResumableTrainer
from logra.sync import Publisher
from logra.sync.publisher import whole_update
from logra.update import PolicyUpdate

RUN = "run"
"""Key of what the run, not the trainer, adds to a state."""


def save(trainer: ResumableTrainer, store: CheckpointStore, run: dict[str, Any] | None = None) -> Checkpoint | None:
    """Write a checkpoint of a trainer between two steps. All processes call it, and process 0 writes.

    Args:
        trainer: in training, or done.
        store: where to.
        run: further plain values, under the key `RUN`.

    Returns:
        The checkpoint; None on the other processes.

    Raises:
        CheckpointError: the disk did not take it; the trainer and older checkpoints are as they were.
    """
    state = trainer.collect() | {RUN: run or {}}
    if distributed.rank() != 0:
        return None
    return store.write(trainer.state.global_step, state, {TRAINER_STATE: trainer.state_json()})


def roll_back(trainer: Any, store: CheckpointStore, checkpoint: Checkpoint) -> int:
    """Return a living trainer to the policy of a checkpoint, between two steps; the run itself goes on.

    Weights, the optimizer's state and what the trainer remembers come back. The step, the place in the data, the random
    generators, the learning rate's schedule, the number of skipped steps and callbacks go on. Policy versions count on
    too: the returned weights become the next version and are published whole, so that the log has no second history and
    whoever follows it needs to know nothing. The projections and the noise of rounding depend on the version, so the next
    steps are not those that were taken back.

    Args:
        trainer: a `logra.rl` trainer.
        store: of its run.
        checkpoint: to return to.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model. The trainer is as it was then.
    """
    store.check(checkpoint)
    state = store.read(checkpoint)
    optimizer = trainer._bare_optimizer()
    kept = [
        {name: group[name] for name in ("lr", "version", "num_skipped") if name in group}
        for group in optimizer.param_groups
    ]
    trainer.load_policy(state)
    trainer.load_optimizer(state)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)
    if isinstance(optimizer, SketchOptimizer):
        publisher: Publisher | None = trainer.publisher
        if publisher is None:
            set_version(optimizer, optimizer.version + 1)
        else:
            update = publish_whole(publisher, optimizer)
            if trainer.use_vllm:
                trainer._engine.add(update)
    return checkpoint.step


def publish_whole(publisher: Publisher, optimizer: SketchOptimizer) -> PolicyUpdate:
    """Make the present weights the next version of the log, whatever version they had, and publish them whole."""
    set_version(optimizer, publisher.log.latest() + 1)
    update = publisher.publish(whole_update(optimizer))
    assert update is not None
    return update


def set_version(optimizer: SketchOptimizer, version: int) -> None:
    """Give the present weights another version."""
    optimizer.param_groups[0]["version"] = version
    optimizer.zero_grad()  # draws the projections of this version


class SaveCheckpoints(TrainerCallback):
    """Writes a checkpoint every few steps, after the last one, and when the run is asked to stop.

    It must be the last callback of a run: what others write or change when a step is logged belongs to the step.

    Args:
        trainer: of the run.
        store: where to.
        every: steps between two checkpoints, >= 1.
        run_state: what the run adds, called after everything of the step is on disk.
        stop_requested: whether the run ends after this step.
        say: shows a line.
    """

    def __init__(
        self,
        trainer: ResumableTrainer,
        store: CheckpointStore,
        *,
        every: int,
        run_state: Callable[[], dict[str, Any]],
        stop_requested: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._store, self._every = trainer, store, every
        self._run_state, self._stop_requested, self._say = run_state, stop_requested, say
        self.last: Checkpoint | None = None
        """The last one that was written."""
        self.seconds = 0.0
        """Time spent on writing, in all."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write if one is due; a disk that does not take it is reported, and the run goes on."""
        if logs is None or "loss" not in logs:
            return
        step = state.global_step
        if (
            step % self._every
            and step < state.max_steps
            and not (self._stop_requested() or control.should_training_stop)
        ):
            return
        start = time.perf_counter()
        try:
            self.last = save(self._trainer, self._store, self._run_state())
        except CheckpointError as error:
            self._say(f"Warning: {error}. Training goes on without it")
        self.seconds += time.perf_counter() - start


class ResumedPublisher(Publisher):
    """The publisher of a run that was resumed: its log may hold updates that this process is about to make again.

    An update that comes out as the log has it is confirmed, not written. One that does not (other hardware, other
    versions of the libraries) cannot replace what replicas may have applied: the weights are published whole, as the
    version after the last.

    Args:
        say: shows a line.
        **arguments: those of `Publisher`.
    """

    def __init__(self, *arguments: Any, say: Callable[[str], None], **keywords: Any) -> None:
        super().__init__(*arguments, repeats=True, **keywords)
        self._say = say

    def publish(self, update: PolicyUpdate | None) -> PolicyUpdate | None:
        """See `Publisher.publish`."""
        if update is None or update.version > self.log.latest() or self.holds(update):
            return super().publish(update)
        optimizer = self.optimizer
        assert isinstance(optimizer, SketchOptimizer)
        self._say(
            f"Warning: update {update.version} did not come out as the log has it (another machine, other versions or "
            f"settings?). The log keeps what it has; the present weights follow it whole, as version "
            f"{self.log.latest() + 1}"
        )
        return publish_whole(self, optimizer)


def estimated_bytes(trainer: Any) -> int:
    """About how large a checkpoint will be, bytes: the trained weights and the optimizer's state."""
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in trainer.model.parameters()
        if parameter.requires_grad
    )
    optimizer = trainer._bare_optimizer()
    if not isinstance(optimizer, SketchOptimizer):
        return 3 * weights  # and two moments
    factors = sum(4 * optimizer.config.rank * sum(target.parameter.shape) for target in optimizer.targets)
    low = sum(2 * target.parameter.numel() for target in optimizer.targets if target.parameter.dtype != torch.float32)
    return weights + factors + low
