"""Checkpoints of a model and its `SketchOptimizer` that any number of processes writes, and any other number reads.

    folder/
        shard-00001-model-00001-of-00001.safetensors     what process 0 wrote; one such file for every process
        state.json                                        settings, version, learning rates and other plain values
        COMPLETE                                          written last: format version, size and SHA-256 of every file

Tensors go through torch.distributed.checkpoint (DCP), under fully qualified names without wrapper segments:

    model.FQN             the model's state dict, tied weights once
    optimizer.FQN.NAME    the optimizer's state of one parameter

A DTensor (FSDP2, tensor parallelism) is saved as the rows and columns that each process holds, with their offsets in the
whole tensor; DCP reads back those that a process holds then, whatever the mesh. What has the rows and columns of a weight
is saved like the weight: the low plane of split weights, and the moments of non-targets. Momentum and second moments of a
target are saved by its owner, and read by the process that owns it then; input scales are whole on every process, and saved
once.

DCP's own file format pickles its metadata. This uses its safetensors format, whose offsets lie in the headers of the files,
and JSON: nothing in the folder is unpickled. (Among themselves, the processes of one run exchange DCP's plans as pickled
objects, as most of torch.distributed does.)

Contract: every element of every tensor comes back with its bits. Errors are raised on all processes alike; all but a disk
that fails while tensors are read are found before anything is changed.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from logra import distributed, shards
from logra.checkpoint import tree
from logra.checkpoint.store import MARKER, file_record, fsync, replace_text
from logra.errors import CheckpointError, LograError
from logra.optim import SketchOptimizer
from logra.optim.ownership import drop_others, own_targets
from logra.optim.state import check_groups, is_moment
from logra.sketch.targets import canonical_fqn

FORMAT_VERSION = 1
_STATE = "state.json"
_T = TypeVar("_T")


def save_sharded(folder: str | Path, optimizer: SketchOptimizer) -> None:
    """Write the weights of the optimizer's model and the optimizer's state; durable on return.

    All processes call it together, between two steps. A process holds the bytes of its part once more while it writes them.

    Args:
        folder: a new or empty folder, in a file system that all processes share.
        optimizer: with its model.

    Raises:
        ConfigError: the process group is not the one whose moments these are.
        CheckpointError: the folder is not empty, or the disk did not take it. A folder without the file COMPLETE is no
            checkpoint and can be deleted.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = Path(folder)
    what = f"checkpoint {str(folder)!r} cannot be written"
    on_all(lambda: _make(folder) if distributed.rank() == 0 else None, what)
    on_all(optimizer.check_processes, what)
    shards.reshard(optimizer.model)
    drop_others(optimizer.targets, optimizer.state)
    tensors, own_scalars = _weights(optimizer.model), {}
    for fqn, parameter in _parameters(optimizer).items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{fqn}.{name}"] = value
            else:
                own_scalars.setdefault(fqn, {})[name] = value
    scalars = {fqn: values for part in distributed.gathered(own_scalars) for fqn, values in part.items()}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    with _dcp(what):
        save(
            _apart(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            no_dist=distributed.num_processes() == 1,
        )

    def write_rest() -> None:
        if distributed.rank() == 0:
            replace_text(folder / _STATE, tree.encode({"scalars": scalars, "param_groups": groups})[0])

    def write_marker() -> None:
        if distributed.rank() == 0:
            marker = {"format_version": FORMAT_VERSION, "files": records}
            replace_text(folder / MARKER, json.dumps(marker, indent=2) + "\n")

    def names() -> list[str]:
        return sorted(path.name for path in folder.iterdir()) if distributed.rank() == 0 else []

    on_all(write_rest, what)
    own_list = on_all(names, what)
    listed = distributed.from_leader(lambda: own_list)  # a shared file system may show the others an older one
    on_all(lambda: _make_durable(folder, listed), what)
    records = _records(folder, listed, what)
    on_all(write_marker, what)


def load_sharded(folder: str | Path, optimizer: SketchOptimizer) -> None:
    """Take weights and state over from a checkpoint, whatever processes wrote it.

    All processes call it together, with a model of the same architecture, spread over them in any way that the optimizer
    supports, and an optimizer built on it with the settings of the saved one.

    Args:
        folder: of `save_sharded`, seen by all processes.
        optimizer: with its model; both are changed in place.

    Raises:
        CheckpointError: it is not complete, damaged, or of another model.
        ConfigError: the optimizer has other targets, or other settings that its state depends on.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = Path(folder)
    what = f"checkpoint {str(folder)!r} cannot be read"
    files = on_all(lambda: _marked_files(folder), what)
    if _records(folder, list(files), what) != files:
        raise CheckpointError(f"{what}: a file is not what was written (size or SHA-256 differs)")
    shards.reshard(optimizer.model)
    reader = HuggingFaceStorageReader(str(folder))

    def plan() -> tuple[dict[str, Tensor], dict[str, dict[str, Any]], list[dict[str, Any]]]:
        saved = tree.decode((folder / _STATE).read_text(encoding="utf-8"), {})
        check_groups(optimizer.param_groups, saved["param_groups"])
        tensors, state = _blank(optimizer, reader.read_metadata().state_dict_metadata)
        for fqn, values in saved["scalars"].items():
            state.setdefault(fqn, {}).update(values)
        return tensors, state, saved["param_groups"]

    tensors, state, groups = on_all(plan, what)
    with _dcp(what):
        load(tensors, storage_reader=reader, no_dist=distributed.num_processes() == 1)
    own = torch.optim.Optimizer.state_dict(optimizer)  # the form alone: the content is read from the checkpoint
    for group, saved_group in zip(own["param_groups"], groups, strict=True):
        group.update(saved_group)
    own["state"] = {
        index: state[fqn]
        for group in own["param_groups"]
        for index, fqn in zip(group["params"], group["fqns"], strict=True)
        if fqn in state
    }
    optimizer.load_state_dict(own)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """`model.FQN` -> tensor of the model's state dict, sharing its memory; tied ones under their first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[f"model.{canonical_fqn(name)}"] = value.detach()
    return found


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors contiguous and each in memory of its own, as safetensors wants them: siblings share input scales."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        plain = tensor.contiguous()
        address = shards.local(plain).untyped_storage().data_ptr()
        result[key] = plain.clone() if address in seen else plain
        seen.add(address)
    return result


def _parameters(optimizer: SketchOptimizer) -> dict[str, nn.Parameter]:
    return {
        fqn: parameter
        for group in optimizer.param_groups
        for fqn, parameter in zip(group["fqns"], group["params"], strict=True)
    }


def _blank(optimizer: SketchOptimizer, saved: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """What DCP reads into: every tensor by its key, those of the optimizer by parameter and name too.

    Args:
        optimizer: to load into.
        saved: key -> DCP's metadata of the tensor.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    tensors = _weights(optimizer.model)
    of_model = {key: metadata for key, metadata in saved.items() if key.startswith("model.")}
    differing = sorted(tensors.keys() ^ of_model.keys()) or [
        f"{key} (saved {list(metadata.size)} {metadata.properties.dtype})"
        for key, metadata in of_model.items()
        if (metadata.size, metadata.properties.dtype) != (tensors[key].shape, tensors[key].dtype)
    ]
    if differing:
        raise CheckpointError(f"it is of another model: {', '.join(differing[:3])} do not fit")
    parameters, targets = _parameters(optimizer), {target.fqn for target in optimizer.targets}
    foreign = targets - {target.fqn for target in own_targets(optimizer.targets)}
    state: dict[str, dict[str, Any]] = {}
    for key, metadata in saved.items():
        if key in of_model:
            continue
        fqn, _, name = key.removeprefix("optimizer.").rpartition(".")
        if fqn not in parameters:
            raise CheckpointError(f"{key!r} belongs to no parameter of this optimizer")
        if fqn in foreign and is_moment(name):
            continue
        parameter, dtype = parameters[fqn], metadata.properties.dtype
        if (name == "lo") if fqn in targets else (name != "step"):
            blank = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            blank = torch.zeros(metadata.size, dtype=dtype, device=parameter.device if metadata.size else None)
        tensors[key] = state.setdefault(fqn, {})[name] = blank
    return tensors, state


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CheckpointError(f"{str(folder)!r} is not empty: give a new folder, or delete what lies there")


def _marked_files(folder: Path) -> dict[str, Any]:
    """Size and digest of every file, as the marker has them."""
    marker = folder / MARKER
    if not marker.is_file():
        raise CheckpointError(f"{str(folder)!r} is no checkpoint, or one that was not finished: it has no {MARKER}")
    content = json.loads(marker.read_text(encoding="utf-8"))
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"format {content['format_version']!r}; this library reads format {FORMAT_VERSION}")
    files = content["files"]
    strangers = sorted({path.name for path in folder.glob("*.safetensors")} - files.keys())
    if strangers:
        raise CheckpointError(f"{str(folder)!r} holds {strangers[0]!r}, which does not belong to the checkpoint")
    return files


def _share(names: list[str]) -> list[str]:
    return names[distributed.rank() :: distributed.num_processes()]


def _make_durable(folder: Path, names: list[str]) -> None:
    """Every process its share of the files."""
    for path in (*(folder / name for name in _share(names)), folder):
        fsync(path)


def _records(folder: Path, names: list[str], what: str) -> dict[str, Any]:
    """Size and digest of files as they are on disk; every process reads its share of them."""
    found = on_all(lambda: {name: file_record(folder / name) for name in _share(names)}, what)
    return {name: record for part in distributed.gathered(found) for name, record in part.items()}


def on_all(action: Callable[[], _T], what: str) -> _T:
    """The result of an action without collectives. If it fails on one process, all of them raise.

    Raises:
        CheckpointError: with `what` and the cause, where that is no error of `logra` itself.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = action()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as caught:
        error = caught
    if not distributed.any_process([error is not None])[0]:
        return result
    if error is None:
        raise CheckpointError(f"{what}: another process met an error, which it reports")
    raise error if isinstance(error, LograError) else CheckpointError(f"{what}: {error!r}") from error


@contextmanager
def _dcp(what: str) -> Iterator[None]:
    """Around DCP: its exception, which is no `Exception` and has the causes of all processes, becomes one of `logra`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is meant
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: process {rank}: {cause!r}") from error
