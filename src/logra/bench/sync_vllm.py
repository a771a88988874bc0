"""What bringing a vLLM engine to the next policy takes: an update against full weights, by three ways into the engine.

Needs an environment with vLLM: `.venv-vllm/bin/logra bench sync_vllm` after `make test-vllm`. A cell builds one engine with
SmolLM2 in fp32, and an ordinary one that knows nothing of `logra`. Full weights, one real update of a default-rank
optimizer, a checkpoint that is written, and vLLM's own reload of it in both engines take turns. Times are those of the
caller, from the call to the acknowledgement: an update is encoded, sent, decoded, checked and merged, and the prefix cache
is emptied.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from logra.bench.harness import Cell, Results, markdown_table, require_known, require_positive
from logra.bench.transfer.engines import WAYS, Engine, engine, ordinary_engine
from logra.optim import SketchOptimizer
from logra.rl.default_model import default_model_path
from logra.sync import BaseModel, Manifest
from logra.sync.layout import canonical_weights
from logra.sync.publisher import optimizer_layout
from logra.update import PolicyUpdate

TITLES = {
    "in_process": "engine in the trainer's process",
    "other_process": "engine in another process (`LLM`'s default)",
    "server": "server over HTTP on loopback",
}
RUN_ID = "bench"
_CHECKPOINT = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    ways: tuple[str, ...] = WAYS
    """Ways into the engine: in_process, other_process, server."""
    num_repeats: int = 7
    """Times each operation is timed; the median counts."""

    def __post_init__(self) -> None:
        require_known("ways", self.ways, WAYS)
        require_positive(self, "num_repeats")


def cells(options: Options) -> list[Cell]:
    """One for each way."""
    return [{"way": way} for way in options.ways]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Build the engine and measure."""
    model = default_model_path()
    update, weights = one_update(model)
    with (
        tempfile.TemporaryDirectory(prefix="logra-bench-") as folder,
        ordinary_engine(model) as reload_ordinary,
        engine(cell["way"], model) as built,
    ):
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        return measure(built, reload_ordinary, update, weights, Path(folder), options.num_repeats)


def measure(
    built: Engine,
    reload_ordinary: Callable[[Path], None],
    update: PolicyUpdate,
    weights: Mapping[str, Tensor],
    folder: Path,
    num_repeats: int,
) -> dict[str, Any]:
    """Median seconds of each way to new weights.

    Args:
        built: the engine.
        reload_ordinary: lets an engine without `logra` load the checkpoint of a folder.
        update: from version 0 to 1.
        weights: {canonical name: weight} of version 0, all of them.
        folder: where checkpoints are written; holds the rest of the model.
        num_repeats: times each operation is timed.

    Returns:
        `load_s`: full weights by the client that sends the update; `first_push_s`: an update right after them; `push_s`: the
        next update; `write_s`: a checkpoint of full
        weights; `reload_s`: vLLM's reload of it, `reload_ordinary_s` in an ordinary engine; `push_bytes` and `load_bytes`, as
        they are sent.
    """
    client = built.client
    client.manifest = Manifest(run_id=RUN_ID, seed=update.seed, base=BaseModel())
    following = replace(update, base_version=update.version, version=update.version + 1)
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for _ in range(num_repeats):
        # In this order: after a reload by vLLM the engine has no version that an update could build on.
        for name, operation in {
            "load": lambda: client.load(weights, 0),
            # The first update after full weights reads all of them once, to learn their magnitudes; in a run it is rare.
            "first_push": lambda: client.push(update),
            "push": lambda: client.push(following),
            "write": lambda: save_file(dict(weights), folder / _CHECKPOINT),
            "reload": lambda: built.reload(folder),
            "reload_ordinary": lambda: reload_ordinary(folder),
        }.items():
            seconds.setdefault(f"{name}_s", []).append(_seconds(operation))
            if name in ("load", "push"):
                assert client.last_delivery is not None
                sizes[f"{name}_bytes"] = client.last_delivery.num_bytes
    return {name: statistics.median(values) for name, values in seconds.items()} | sizes


def one_update(model: Path) -> tuple[PolicyUpdate, dict[str, Tensor]]:
    """An update of the default settings of `SketchOptimizer` from a gradient of the model, and all weights before it.

    Args:
        model: folder of the model.
    """
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = SketchOptimizer(policy, lr=3e-4)
    layout = optimizer_layout(optimizer)
    before = {name: value.detach().clone() for name, value in canonical_weights(layout).items()}
    tokens = torch.arange(100, 164).view(2, 32)
    policy(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert optimizer.last_update is not None
    return replace(optimizer.last_update, run_id=RUN_ID), before


def table(results: Results) -> str:
    """Seconds, and how many times an update is faster."""
    rows = []
    for way in results.values("way"):
        (found,) = results.select(way=way)
        written = found["write_s"] + found["reload_ordinary_s"]
        others = (found["load_s"], written, found["reload_ordinary_s"], found["reload_s"])
        rows.append([TITLES[way], f"{found['push_s']:.2f} s", *(_against(found["push_s"], other) for other in others)])
    header = ["way", "update", "full weights, the same way", "checkpoint written, then reloaded (ordinary engine)",
              "reload alone (ordinary engine)", "reload alone (this engine)"]  # fmt: skip
    return markdown_table(header, rows)


def _against(update_s: float, other_s: float) -> str:
    return f"{other_s:.2f} s ({other_s / update_s:.1f}x)"


def _seconds(operation: Callable[[], Any]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start
