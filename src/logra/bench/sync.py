"""What one step costs to send and to apply: the packet next to full weights, a sparse delta and dense low-rank factors.

A cell trains the default run for a few steps and measures the last. SmolLM2's packet is the real one; encoding,
decoding, applying and a reload of all weights from a file take turns in one process. The packet at the shapes of
Qwen2.5-7B is drawn from the same factors, see `logra.bench.transfer.resample`; ranks below that of the run keep a random
part of every row.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from logra.bench.harness import Cell, Ratio, Results, markdown_table, require_positive, spread
from logra.bench.lab.training import trained
from logra.bench.transfer.alternatives import full_bytes, low_rank_bytes, sparse_delta
from logra.bench.transfer.resample import QWEN_7B, SMOLLM2, Architecture, resampled
from logra.rl.default_model import default_model_path
from logra.sync import DirectoryLog, Replica
from logra.update import PolicyUpdate

LOWER_RANKS = (28, 16, 14, 8)
WAYS = {
    "full_bytes": "all weights, bf16",
    "sparse_bytes": "elements that change in bf16: indices and values, byte planes, zstd",
    "low_rank_bytes": "factors of the same rank in bf16 (LoRA)",
    "packet_bytes": "packet",
}
OPERATIONS = {
    "encode_s": "encode the packet",
    "decode_s": "decode the packet",
    "decode_apply_s": "decode and apply it",
    "reload_s": "load all weights from a safetensors file, fp32",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of the runs (about three minutes each on one core)."""
    num_steps: int = 3
    """Steps of a run, whose last is measured; at least 1."""
    num_repeats: int = 7
    """Times each operation is timed; the median counts."""

    def __post_init__(self) -> None:
        require_positive(self, "num_steps", "num_repeats")


CHECK = Options(num_steps=1, num_repeats=1)
"""The run whose sizes `make bench-check` compares. Its first step is the same on any machine, up to rounding; later ones, of
weights and samples that followed from it, are not.
"""


def cells(options: Options) -> list[Cell]:
    """One for each seed."""
    return [{"seed": seed} for seed in options.seeds]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Train, and measure the last step: {model: numbers}."""
    flags = ("--run.num-steps", str(options.num_steps), "--run.seed", str(cell["seed"]), "--num-heldout", "0")
    with trained(*flags) as run:
        log = DirectoryLog(run / "updates")
        update = log.read(log.latest())
        return {
            SMOLLM2.name: measure_step(log, _base_model(), run, SMOLLM2, options.num_repeats),
            QWEN_7B.name: measure_shapes(update, QWEN_7B, options.num_repeats),
        }


def measure_step(
    log: DirectoryLog, model: nn.Module, folder: Path, architecture: Architecture, num_repeats: int
) -> dict[str, Any]:
    """Bytes and seconds of the last step of a log.

    Args:
        log: of a run of the model.
        model: its base, fp32.
        folder: for a checkpoint of full weights.
        architecture: of the model.
        num_repeats: times each operation is timed.

    Returns:
        `*_bytes` of each way to send the step, `*_s` of the operations (medians), the share of elements that change in
        bf16, and by what factor a packet that is resampled to the model's own shapes differs from the real one.
    """
    replica = Replica(model)
    replica.catch_up(log, until=log.latest() - 1)
    update = log.read(log.latest())
    before = {name: replica.weights()[name].clone() for name in update.weights}
    replica.apply(update)
    sparse_bytes, num_changed = sparse_delta(before, replica.weights())
    checkpoint = folder / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in replica.weights().items()}, checkpoint)
    data = log.read_packet(update.version)
    seconds = _interleaved(
        num_repeats,
        encode_s=lambda: _encode(update),
        decode_s=lambda: PolicyUpdate.from_bytes(data),
        decode_apply_s=lambda: _apply_again(replica, PolicyUpdate.from_bytes(data)),
        reload_s=lambda: replica.load(load_file(checkpoint), update.version),
    )
    again = resampled(update, architecture, _rank(update))
    return _bytes(update, architecture) | {
        "sparse_bytes": sparse_bytes,
        "changed_share": num_changed / sum(value.numel() for value in before.values()),
        "resampled_over_real": again.num_bytes / len(data),
        **seconds,
    }


def measure_shapes(update: PolicyUpdate, architecture: Architecture, num_repeats: int) -> dict[str, Any]:
    """Bytes of one step at the shapes of a model and several ranks, and seconds of its codec at the full rank."""
    rank = _rank(update)
    lower = {str(part): resampled(update, architecture, part).num_bytes for part in LOWER_RANKS if part < rank}
    scaled = resampled(update, architecture, rank)
    data = _encode(scaled)
    seconds = _interleaved(
        num_repeats, encode_s=lambda: _encode(scaled), decode_s=lambda: PolicyUpdate.from_bytes(data)
    )
    return _bytes(scaled, architecture) | {"by_rank_bytes": {str(rank): len(data), **lower}, **seconds}


def table(results: Results) -> str:
    """Bytes, bytes by rank, and seconds as shares of a reload; means over seeds."""
    found = results.select()
    small, large = ([result[name] for result in found] for name in (SMOLLM2.name, QWEN_7B.name))
    rows = []
    for key, title in WAYS.items():
        row = [title]
        for runs in (small, large):
            row += ["", ""] if key not in runs[0] else _size_and_ratio(runs, [run[key] for run in runs])
        rows.append(row)
    header = ["what is sent for one step"]
    for name in (SMOLLM2.name, QWEN_7B.name):
        header += [name, "smaller than full"]
    return "\n\n".join((markdown_table(header, rows), _ranks_table(large), _seconds_table(small)))


def ratios(results: Results) -> dict[str, Ratio]:
    """How many times as large as the packet the other ways are. Sizes only: they are the same on a busy machine."""
    others = {"full_bytes": "full weights", "sparse_bytes": "sparse delta", "low_rank_bytes": "LoRA-sized factors"}
    return {
        f"{title} over packet, {model}": Ratio(found[key] / found["packet_bytes"], "higher")
        for result in results.select()
        for model, found in result.items()
        for key, title in others.items()
        if key in found
    }


def _size_and_ratio(runs: Sequence[dict[str, Any]], sizes: Sequence[int]) -> list[str]:
    size, full = statistics.fmean(sizes), runs[0]["full_bytes"]
    return [f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB", f"{full / size:.0f}x"]


def _ranks_table(runs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for rank in runs[0]["by_rank_bytes"]:
        rows.append(
            [f"{QWEN_7B.name}, rank {rank}", *_size_and_ratio(runs, [run["by_rank_bytes"][rank] for run in runs])]
        )
    return markdown_table(["packet", "size", "smaller than full"], rows)


def _seconds_table(runs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for key, title in OPERATIONS.items():
        milliseconds = statistics.fmean(1000 * run[key] for run in runs)
        share = spread([run[key] / run["reload_s"] for run in runs])
        rows.append([f"{SMOLLM2.name}: {title}", f"{milliseconds:.0f} ms", share])
    return markdown_table(["operation", "median", "share of a full reload"], rows)


def _bytes(update: PolicyUpdate, architecture: Architecture) -> dict[str, Any]:
    return {
        "full_bytes": full_bytes(architecture.num_weights),
        "low_rank_bytes": low_rank_bytes(update.weights.values()),
        "packet_bytes": update.num_bytes,
    }


def _rank(update: PolicyUpdate) -> int:
    return max(weight.rank for weight in update.weights.values())


def _base_model() -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32)


def _encode(update: PolicyUpdate) -> bytes:
    return update.to_bytes()


def _apply_again(replica: Replica, update: PolicyUpdate) -> None:
    """Merge an update once more: weights move on, which the time does not depend on."""
    replica.version = update.base_version
    replica.apply(update)


def _interleaved(num_repeats: int, **operations: Callable[[], Any]) -> dict[str, float]:
    """Median seconds of operations that take turns, so that a busy machine slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(num_repeats):
        for name, operation in operations.items():
            start = time.perf_counter()
            operation()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
