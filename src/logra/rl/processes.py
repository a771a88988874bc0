"""`logra train` in the processes of a launcher (torchrun): how they join, what they may be asked for, and how all end.

Every process runs the whole of `logra.rl.run` on its own part of each step's prompts. Process 0 leads: it alone writes the
run folder, the log of updates and the checkpoints, shows the run, and decides where it continues.

An error of one process ends all. It is put into the launcher's store before the process leaves; the others, whose next
collective fails for want of a partner (or which the launcher stops), find it there and end with it. Nothing is left waiting.
An error that all of them meet stays what it is on each.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from logra import distributed
from logra.errors import ConfigError, OtherProcessError
from logra.sync.anchor import digest_of

if TYPE_CHECKING:
    from logra.rl.config import TrainConfig

_LAUNCHER = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_STORE_TIMEOUT = timedelta(seconds=5)
_COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Of the group. Torch's own, 10 minutes with NCCL, would end a healthy run: process 0 alone writes checkpoints and the model,
which takes longer on a slow disk, while the others wait for it. Whoever waits for a dead process is stopped by the launcher.
"""


@contextmanager
def joined(config: "TrainConfig") -> Iterator[None]:
    """Inside, this process belongs to the group that the launcher describes in the environment; without one it is alone.

    Raises:
        ConfigError: the environment describes a group halfway, or the settings do not suit several processes.
        OtherProcessError: another process ended the run first.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if missing := [name for name in _LAUNCHER if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment, but no {', '.join(missing)}: start several processes "
            f"with torchrun, or unset WORLD_SIZE"
        )
    on_cpu = config.run.device == "cpu" or not torch.accelerator.is_available()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_cpu and num_local > torch.accelerator.device_count():
        raise ConfigError(
            f"run.device={config.run.device!r}: {num_local} processes on a machine with {torch.accelerator.device_count()} "
            f"accelerators. Start as many as there are, or set run.device=cpu"
        )
    from accelerate import PartialState

    PartialState(cpu=on_cpu, timeout=_COLLECTIVE_TIMEOUT)
    try:
        _require_suitable(config)
        yield
    except BaseException as error:
        own = _described(error)
        first = _first_error(f"process {distributed.rank()}: {own}")
        if first.partition(": ")[2] != own and not isinstance(error, KeyboardInterrupt):
            raise OtherProcessError(f"the run was ended by {first}") from error
        raise


def announce(error: BaseException) -> None:
    """Tell the other processes why this one leaves them, where the error does not leave `joined`."""
    if distributed.num_processes() > 1:
        _first_error(f"process {distributed.rank()}: {_described(error)}")


def require_same_weights(model: str, parameters: Mapping[str, Tensor]) -> None:
    """Refuse to go on from different copies of a model. All processes must call it: where one returns, all have come so far.

    Args:
        model: as the user gave it.
        parameters: {name: what this process starts from}.

    Raises:
        ConfigError: on all processes, if the weights of two of them differ.
    """
    if distributed.num_processes() == 1:
        return
    digests = distributed.gathered(digest_of(parameters))
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ConfigError(
            f"model={model!r}: the weights of process {', '.join(others)} are not those of process 0. Give every machine the "
            f"same copy of the model, or a path that all of them see"
        )


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _first_error(own: str) -> str:
    """The error of the process that failed first; `own` if that was this one, or nobody can be asked."""
    key = f"logra/first_error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = dist.TCPStore(  # type: ignore[reportPrivateImportUsage]
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_STORE_TIMEOUT
        )
        return store.compare_set(key, "", own).decode()
    except RuntimeError:  # the process that held the store is gone
        return own


def _require_suitable(config: "TrainConfig") -> None:
    """Refuse settings that cannot be split over the processes, or were made for one."""
    from logra.rl import fsdp

    if fsdp.is_asked_for(None):
        raise ConfigError(
            "fsdp: logra train runs on replicas. Start it with torchrun, or use logra.rl.GRPOTrainer under accelerate launch"
        )
    num_processes = distributed.num_processes()
    rollout, micro = config.rollout, config.loss.micro_batch_size
    if rollout.num_prompts % num_processes:
        raise ConfigError(
            f"rollout.num_prompts={rollout.num_prompts} on {num_processes} processes: must be a multiple of their number, so "
            f"that each process samples whole groups"
        )
    own = rollout.num_completions // num_processes
    if own % micro:
        raise ConfigError(
            f"loss.micro_batch_size={micro} on {num_processes} processes: must divide the {own} completions of a step that "
            f"each of them has (rollout.num_prompts={rollout.num_prompts} x rollout.num_samples={rollout.num_samples} / "
            f"{num_processes})"
        )
    if rollout.engine != "transformers":
        raise ConfigError(
            f"rollout.engine={rollout.engine!r} on {num_processes} processes: allowed is transformers. An engine follows one "
            f"process"
        )
    if config.method not in ("logra", "paper") and config.prices_steps:
        raise ConfigError(
            f"use_trust=true with method={config.method} on {num_processes} processes: a dense step is priced in one process"
        )
    if config.guards.may_roll_back:
        raise ConfigError(
            f"guards.sentinels: action rollback on {num_processes} processes: it needs one; allowed are off, warn, skip, "
            f"stop"
        )
