"""What a checkpoint of a trainer holds, and TRL's trainer with resuming that is exact and reads no pickle.

transformers finds its way back into the data (epoch, batches to skip), and calls the methods below for the rest. Its own
versions of them read `torch.save` files; these take a state that was read from `logra.checkpoint`. Two gaps are closed:
TRL's sampler draws a new order every epoch from a generator that a resumed run would start anew, and TRL counts its
generations from zero.

Contract: a trainer that `load`s the state that another one `collect`ed after step s, and trains, computes the bits that
the other computed after s, on the same machine, versions and number of threads.
"""

import copy
import dataclasses
import hashlib
import json
import random
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from trl.trainer.grpo_trainer import GRPOTrainer as TRLTrainer

from logra import distributed, shards
from logra.errors import CheckpointError
from logra.optim import SketchOptimizer
from logra.rl.projected_state import load_plain_state, plain_state

TRAINER_STATE = "trainer_state.json"
"""The file that transformers reads the step and the epoch from."""


@runtime_checkable
class Stateful(Protocol):
    """A callback whose state belongs into a checkpoint.

    Attributes:
        checkpoint_name: names it, unique in a run.
    """

    checkpoint_name: str

    def state_dict(self) -> dict[str, Any]:
        """Tensors, texts, numbers, and lists and dicts of them."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; tensors come on the CPU."""
        ...


class ResumableTrainer(TRLTrainer):
    """`trl.GRPOTrainer` that continues from a state of `collect`."""

    model: Any  # transformers types these more loosely than TRL guarantees them
    args: Any
    _resumed: dict[str, Any] | None = None

    # ---- what a checkpoint holds ----

    def collect(self) -> dict[str, Any]:
        """Everything that the next steps depend on, between two steps; tensors are not copied.

        All processes call it, and it is whole on process 0. Of their own the others have random generators, and moments of
        targets that they own.

        Raises:
            CheckpointError: the model is sharded, or a generation is still in use.
        """
        if shards.is_fsdp(self.model):
            raise CheckpointError("the model is sharded: use logra.checkpoint.save_sharded, or TRL's own save_strategy")
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            raise CheckpointError(
                f"step {self.state.global_step} is in the middle of a generation that is still in use"
            )
        return {
            "step": self.state.global_step,
            "weights": trained_tensors(self.model),
            "frozen_sha256": self._frozen_sha256(),
            "optimizer": self._optimizer_state(),
            "scheduler": self._scheduler().state_dict(),
            "random": random_states(),
            "random_of_others": self._random_of_others(),
            "trainer": self._own_state(),
            "callbacks": {callback.checkpoint_name: callback.state_dict() for callback in self._stateful()},
        }

    def state_json(self) -> str:
        """transformers' own state (step, epoch, tokens seen) without the history of all logs."""
        state = copy.copy(self.state)
        state.log_history = []
        return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"

    def resume_from(self, state: dict[str, Any]) -> None:
        """Let the coming `train(resume_from_checkpoint=folder)` continue from this state.

        Args:
            state: from `collect`. The folder needs `TRAINER_STATE` alone.
        """
        self._resumed = state

    def load_policy(self, state: dict[str, Any]) -> None:
        """Take over the weights of a state.

        Raises:
            CheckpointError: they belong to another model, or the weights that are not trained are others.
        """
        self.require_same_base(state)
        load_tensors(self.model, state["weights"])

    def require_same_base(self, state: dict[str, Any]) -> None:
        """Refuse a state of another base model, before anything is loaded.

        Args:
            state: from `collect`.

        Raises:
            CheckpointError: the weights that are not trained are others.
        """
        if state["frozen_sha256"] != self._frozen_sha256():
            raise CheckpointError(
                "the weights that are not trained differ from those of the checkpoint: the base model has changed"
            )

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take over the optimizer's state, and what the trainer itself remembers."""
        load_plain_state(self._bare_optimizer(), state["optimizer"])
        self._load_own_state(state["trainer"])

    def _own_state(self) -> dict[str, Any]:
        """What the trainer itself remembers from step to step: plain values."""
        return {"beta": float(self.beta)}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.beta = state["beta"]

    def _random_of_others(self) -> list[dict[str, Any]]:
        """`random_states` of the processes after the first."""
        if self.accelerator.num_processes == 1:
            return []
        return distributed.gathered(random_states())[1:]

    def _stateful(self) -> list[Stateful]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, Stateful)]

    def _bare_optimizer(self) -> Any:
        """The optimizer without the wrapper of accelerate."""
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def _optimizer_state(self) -> dict[str, Any]:
        """All of it on process 0; every process calls it."""
        optimizer = self._bare_optimizer()
        return optimizer.whole_state_dict() if isinstance(optimizer, SketchOptimizer) else plain_state(optimizer)

    def _scheduler(self) -> Any:
        return self.lr_scheduler

    def _frozen_sha256(self) -> str:
        """Digest of the parameters that are not trained, computed once."""
        if not hasattr(self, "_frozen_digest"):
            digest = hashlib.sha256()
            for name, parameter in sorted(self.model.named_parameters()):
                if not parameter.requires_grad:
                    digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
                    data: Any = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                    digest.update(data)
            self._frozen_digest = digest.hexdigest()
        return self._frozen_digest

    # ---- called by transformers, in this order ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        return self.load_policy(self._resumed)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        sampler: Any = super()._get_train_sampler(dataset)
        if self._resumed is not None and sampler.shuffle:
            batch_size: Any = self._train_batch_size * self.args.steps_per_generation
            num_batches = len(sampler) // (batch_size * self.accelerator.num_processes)  # of one process
            num_updates = max(-(-num_batches // self.args.gradient_accumulation_steps), 1)
            for _ in range(self._resumed["step"] // num_updates):
                # The orders of the epochs that are over.
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        self.load_optimizer(self._resumed)
        self._scheduler().load_state_dict(self._resumed["scheduler"])
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        saved, present = (
            self._resumed["callbacks"],
            {callback.checkpoint_name: callback for callback in self._stateful()},
        )
        if saved.keys() != present.keys():
            raise CheckpointError(f"the checkpoint holds the state of {sorted(saved)}; this run has {sorted(present)}")
        for name, callback in present.items():
            callback.load_state_dict(saved[name])
        return None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            return super()._load_rng_state(checkpoint)
        every = [self._resumed["random"], *self._resumed.get("random_of_others", [])]
        if self.accelerator.process_index < len(every):  # a process that was not there before keeps its own
            load_random_states(every[self.accelerator.process_index])
        self._resumed = None  # the last thing that transformers asks for: the tensors are no longer needed
        return None


def trained_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """{name: tensor} of the parameters that are trained, and of the buffers that the model saves; not copied."""
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen | tied}


@torch.no_grad()
def load_tensors(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of `trained_tensors` back, in place.

    Raises:
        CheckpointError: other names, shapes or dtypes; nothing has been written then.
    """
    own = trained_tensors(model)
    differing = sorted(own.keys() ^ tensors.keys()) or sorted(
        name for name in own if (own[name].shape, own[name].dtype) != (tensors[name].shape, tensors[name].dtype)
    )
    if differing:
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(differing[:3])} do not fit")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def random_states() -> dict[str, Any]:
    """The states of all generators of this process: Python, numpy, torch on the CPU and on every CUDA device."""
    of_numpy: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = of_numpy
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], *rest),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
