"""How memory, reduction and fan-out grow with GPUs and replicas: a simulation on the shapes of models.

Arithmetic alone (`logra.planner.scaling`): nothing is run or timed, and links and latencies are assumed. The formulas for
memory are tested against `logra plan`, the real step over fake tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, require_positive
from logra.planner.models import PRESETS, load_config
from logra.planner.scaling import (
    METHODS,
    Links,
    Shapes,
    fan_out,
    held_bytes,
    model_shapes,
    reduction,
    update_bytes,
)

_TITLES = {"adamw": "AdamW", "lora": "LoRA", "logra": "logra"}


@dataclass(frozen=True, kw_only=True)
class Options(Links):
    """What to simulate, and with which links."""

    models: tuple[str, ...] = ("qwen2.5-7b", "llama-3.1-70b")
    """Presets of `logra plan`, or paths of a config.json."""
    max_gpus: int = 512
    """Most GPUs that train; every power of two up to it."""
    max_replicas: int = 64
    """Most rollout replicas; every power of two up to it."""
    rank: int = 32
    """Of sketches and updates."""
    lora_rank: int = 16
    """Of LoRA's adapters."""
    num_micro_batches: int = 4
    """Per update and GPU."""
    bits_per_integer: float = 3.3
    """Size of a packet over its integers, bits, exponents included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_gpus", "max_replicas", "rank", "lora_rank", "num_micro_batches", "bits_per_integer")
        for model in self.models:
            if model not in PRESETS:  # a preset needs no look, which would import transformers
                load_config(model)


def cells(options: Options) -> list[Cell]:
    """One for each model."""
    return [{"model": model} for model in options.models]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Bytes and seconds by number of GPUs and of replicas."""
    shapes = model_shapes(load_config(cell["model"]))
    return {
        "num_parameters": shapes.num_parameters,
        "gpus": {str(count): _training(shapes, count, options) for count in _powers(options.max_gpus)},
        "replicas": {str(count): _serving(shapes, count, options) for count in _powers(options.max_replicas)},
    }


def _training(shapes: Shapes, num_gpus: int, options: Options) -> dict[str, dict[str, Any]]:
    found = {}
    for method in METHODS:
        rank = options.lora_rank if method == "lora" else options.rank
        traffic = reduction(shapes, method, num_gpus, rank, options.num_micro_batches, options)
        found[method] = {
            "held_bytes": held_bytes(shapes, method, num_gpus, rank),
            "sent_bytes": traffic.sent_bytes,
            "reduce_s": traffic.seconds,
        }
    return found


def _serving(shapes: Shapes, num_replicas: int, options: Options) -> dict[str, dict[str, float]]:
    found = {}
    for method in METHODS:
        rank = options.lora_rank if method == "lora" else options.rank
        size = update_bytes(shapes, method, rank, options.bits_per_integer)
        in_turn, broadcast = fan_out(size, num_replicas, options)
        found[method] = {"update_bytes": size, "in_turn_s": in_turn, "broadcast_s": broadcast}
    return found


def table(results: Results) -> str:
    """For every model: a row for each number of GPUs, and one for each number of replicas."""
    parts = []
    for record in results.records:
        name, result = record.cell["model"], record.result
        parts.append(f"**{name}**, {result['num_parameters'] / 1e9:.1f} G parameters")
        parts.append(_training_table(result["gpus"]))
        parts.append(_serving_table(result["replicas"]))
    return "\n\n".join(parts)


def _training_table(by_count: dict[str, Any]) -> str:
    rows = []
    for count, found in by_count.items():
        row = [count]
        row += [f"{sum(found[method]['held_bytes'].values()) / 1e9:.2f}" for method in METHODS]
        row += [f"{found[method]['sent_bytes'] / 1e9:.2f}" for method in METHODS]
        row += [_seconds(found[method]["reduce_s"]) for method in METHODS]
        rows.append(row)
    return markdown_table(_header("GPUs", ("held, GB", "sent, GB", "reduction, s")), rows)


def _serving_table(by_count: dict[str, Any]) -> str:
    rows = []
    for count, found in by_count.items():
        row = [count]
        for key in ("in_turn_s", "broadcast_s"):
            row += [_seconds(found[method][key]) for method in METHODS]
        rows.append(row)
    sizes = next(iter(by_count.values()))
    texts = ", ".join(f"{_TITLES[method]} {sizes[method]['update_bytes'] / 1e9:.3g} GB" for method in METHODS)
    header = _header("replicas", ("in turn, s", "broadcast, s"))
    return f"Sent to each replica for one update: {texts}.\n\n{markdown_table(header, rows)}"


def _header(first: str, titles: Sequence[str]) -> list[str]:
    return [first, *(f"{title}: {_TITLES[method]}" for title in titles for method in METHODS)]


def _seconds(value: float) -> str:
    """Two digits, without an exponent."""
    return "0" if value == 0 else f"{value:.{max(1 - math.floor(math.log10(value)), 0)}f}"


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
