"""FSDP2 as `accelerate launch` sets it up, under the sketch optimizer.

transformers builds the optimizer on the whole model, accelerate shards the model afterwards (`Accelerator.prepare`) and
exchanges the parameters in the optimizer's groups. A sketch optimizer needs more than that: which rows of a weight are
here, and forwards of modules that own shards. So the order is turned round:

1. `shard`           accelerate's own sharding, by the plugin's settings, before the optimizer is built
2.                   `Accelerator.prepare` finds a model that is sharded, and leaves it as it is
3. `GroupParameters` undoes its exchange, which goes by addresses: those of empty shards are all 0

Checkpoints of transformers get the sharded files of `logra.checkpoint` in the place of accelerate's.

Refuses: FSDP1 and CPU offload, and a device for which accelerate ignores its FSDP settings in silence (ConfigError).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule

from logra import distributed
from logra.checkpoint import load_sharded, save_sharded, tree
from logra.checkpoint.sharded import on_all
from logra.checkpoint.store import fsync, replace_text
from logra.errors import CheckpointError, ConfigError
from logra.optim import SketchOptimizer

_SHARDS, _SCHEDULER = "sharded", "scheduler.json"
"""In a checkpoint folder of transformers."""


def is_asked_for(args: Any) -> bool:
    """Whether arguments, or the launcher, ask for FSDP.

    Args:
        args: transformers' training arguments, or None.
    """
    return bool(args is not None and args.fsdp) or is_set("ACCELERATE_USE_FSDP")


def refuse_settings(args: Any) -> None:
    """Refuse what can be known before the model is loaded.

    Raises:
        ConfigError: FSDP1, CPU offload, or a vLLM engine beside FSDP.
    """
    if not is_asked_for(args):
        return
    if args is not None and args.use_vllm:
        raise ConfigError(
            "use_vllm=True with fsdp: the engine would need the whole weights of the version that it starts from, which "
            "shards do not have in one place. Use examples/accelerate/ddp.yaml, or set use_vllm=False."
        )
    given: dict[str, Any] = (args is not None and getattr(args, "fsdp_plugin_args", None)) or {}
    version = given.get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))
    if str(version) != "2":
        raise ConfigError(
            f"fsdp_version={version}: FSDP1 flattens the weights, so that their gradients cannot be sketched. Set "
            f"fsdp_version: 2 (see examples/accelerate/fsdp2.yaml)."
        )
    if given.get("cpu_offload") or is_set("FSDP_OFFLOAD_PARAMS"):
        raise ConfigError("fsdp_offload_params: CPU offload is not supported. Set fsdp_offload_params: false.")


def refuse_ignored(accelerator: Accelerator, args: Any) -> None:
    """Refuse FSDP where accelerate would train replicas instead, without a word.

    Raises:
        ConfigError: on a CPU, for example.
    """
    if is_asked_for(args) and not accelerator.is_fsdp2:
        raise ConfigError(
            f"fsdp: accelerate has no FSDP for {accelerator.state.distributed_type} and would train whole replicas. Use "
            f"examples/accelerate/ddp.yaml, or logra.SketchOptimizer on a model of fully_shard (docs/distributed.md)."
        )


def shard(accelerator: Accelerator, model: nn.Module) -> None:
    """Shard a model in place as `accelerator.prepare` would. Doing it twice changes nothing."""
    if isinstance(model, FSDPModule):
        return
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.activation_checkpointing:
        plugin.set_auto_wrap_policy(model)
        fsdp2_apply_ac(accelerator, model)
        plugin.activation_checkpointing = False  # `prepare` would wrap every layer once more
    fsdp2_prepare_model(accelerator, model)
    find = getattr(model, "get_input_embeddings", None)
    embedding = None if find is None else find()
    if isinstance(embedding, FSDPModule) and all(
        list(group.modules) == [embedding] for group in embedding._get_fsdp_state()._fsdp_param_groups
    ):
        embedding.set_unshard_in_backward(False)  # its backward takes no weight; a head in its group does


class GroupParameters:
    """The parameters of an optimizer's groups, to be put back after `Accelerator.prepare`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Put them back."""
        for group, parameters in zip(self._optimizer.param_groups, self._parameters, strict=True):
            group["params"] = list(parameters)


def save_state(folder: str, optimizer: SketchOptimizer, scheduler: Any) -> None:
    """Add weights, optimizer and scheduler to a checkpoint of transformers. All processes call it together.

    Raises:
        CheckpointError: see `logra.checkpoint.save_sharded`.
    """
    shards = Path(folder, _SHARDS)
    new, old = shards.with_name(f"{_SHARDS}.new"), shards.with_name(f"{_SHARDS}.old")
    if distributed.rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
    save_sharded(new, optimizer)

    def put_in_place() -> None:
        """Transformers writes over a checkpoint that a run had left before it was resumed: its shards stay until here."""
        if distributed.rank() > 0:
            return
        replace_text(Path(folder, _SCHEDULER), tree.encode(scheduler.state_dict())[0])
        if shards.exists():
            shutil.rmtree(old, ignore_errors=True)
            shards.rename(old)
        new.rename(shards)
        fsync(shards.parent)
        shutil.rmtree(old, ignore_errors=True)

    on_all(put_in_place, f"checkpoint {folder!r} cannot be written")


def load_state(folder: str, optimizer: SketchOptimizer, scheduler: Any) -> None:
    """Take over what `save_state` added, on any number of processes.

    Raises:
        CheckpointError: the scheduler's file is missing or damaged; else see `logra.checkpoint.load_sharded`. Nothing has
            been changed then.
    """

    def read_scheduler() -> dict[str, Any]:
        path = Path(folder, _SCHEDULER)
        try:
            saved = tree.decode(path.read_text(encoding="utf-8"), {})
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(path)!r} is missing or damaged ({error})") from error
        wanted = {name for name in scheduler.state_dict() if not name.startswith("_")}
        if not isinstance(saved, dict) or not wanted <= saved.keys():
            raise CheckpointError(
                f"{str(path)!r} is not the state of a {type(scheduler).__name__}: it needs {sorted(wanted)}"
            )
        return saved

    saved = on_all(read_scheduler, f"checkpoint {folder!r} cannot be read")
    load_sharded(Path(folder, _SHARDS), optimizer)
    scheduler.load_state_dict(saved)


def is_set(name: str) -> bool:
    """Whether `accelerate launch` has switched a feature on, by its environment variable."""
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")
