"""Time of one whole update (forward, backward, clip, step) against dense AdamW, LoRA and GaLore.

A cell is one width, or one model, at one size of the update and of its micro-batches. All methods train the same linear
layers (LoRA: adapters of them) of equal Llama blocks of random weights, or of the whole of SmolLM2 with its head of 49,152
tokens, on the same tokens, one update each in turn, in one process, so that a busy machine slows all about alike; the order
changes from round to round. The blocks stand for some in the middle of a model: their inputs require a gradient.
With one thread, seconds are those that the thread ran, without those it waited for its turn. `logra` and `paper` include
all that their step is made of: recovery, the trust region's prediction and check, rounding and merge.
"""

import gc
import importlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import logra
from logra import phases
from logra.bench.harness import Cell, Ratio, Results, markdown_table, require_known, require_positive, spread
from logra.errors import ConfigError

METHODS = {
    "adamw": "dense AdamW (fused)",
    "lora": "LoRA (peft), AdamW (fused) on the adapters",
    "galore": "GaLore (galore-torch) AdamW",
    "logra": "`logra` (two-sided, spectral, momentum 0.9, input scaling)",
    "paper": "`paper` (one-sided `row_adam`)",
}
VOCABULARY = 1024
SMOLLM2, SMOLLM2_RANK = "SmolLM2-135M", 16
"""The whole default model, and the rank of the default run: of sketches, adapters and GaLore."""
HEAD_WIDTH = 64
"""Features of an attention head of the blocks."""
GALORE_GAP = 200
"""Steps between two SVDs of GaLore; their time is shared out over them."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    hidden: tuple[int, ...] = (512, 1024, 2048)
    """Widths of the blocks; the MLP is 2.75 times as wide."""
    models: tuple[str, ...] = (SMOLLM2,)
    """Whole models: SmolLM2-135M, at the rank of the default run."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods, timed in turn; adamw must be one."""
    rank: int = 64
    """Rank of sketches, adapters and GaLore in the blocks."""
    num_layers: int = 1
    """Blocks."""
    num_responses: tuple[int, ...] = (64,)
    """Responses per update."""
    micro_batch_sizes: tuple[int, ...] = (8, 2)
    """Responses per micro-batch, whose gradients are accumulated; each must divide the responses per update."""
    num_tokens: int = 64
    """Generated tokens per response, after a prompt of one."""
    num_rounds: int = 3
    """Timed updates of each method."""

    def __post_init__(self) -> None:
        require_known("models", self.models, (SMOLLM2,))
        require_known("methods", self.methods, METHODS)
        if "adamw" not in self.methods:
            raise ConfigError("methods: adamw must be among them, it is what the others are compared with")
        require_positive(
            self, "hidden", "rank", "num_layers", "num_responses", "micro_batch_sizes", "num_tokens", "num_rounds"
        )
        for hidden in self.hidden:
            if hidden % HEAD_WIDTH:
                raise ConfigError(f"hidden={hidden}: must be a multiple of {HEAD_WIDTH}, the width of a head")
        for num_responses, size in product(self.num_responses, self.micro_batch_sizes):
            if num_responses % size:
                raise ConfigError(f"micro_batch_sizes={size}: must divide num_responses={num_responses}")


CHECK = Options(
    hidden=(512,),
    models=(),
    methods=("adamw", "logra", "paper"),
    num_responses=(32,),
    micro_batch_sizes=(8,),
    num_rounds=9,
)
"""The cell whose ratios `make bench-check` compares."""


class Method(Protocol):
    """A model with its optimizer."""

    model: nn.Module

    def step(self, batches: list[Tensor]) -> None:
        """Clip and step."""
        ...


def cells(options: Options) -> list[Cell]:
    """Every width, then every model, with every size of update and micro-batch."""
    models: list[Cell] = [{"hidden": hidden} for hidden in options.hidden]
    models += [{"model": model} for model in options.models]
    return [
        {**model, "num_responses": num_responses, "micro_batch_size": size}
        for model, num_responses, size in product(models, options.num_responses, options.micro_batch_sizes)
    ]


def _name(cell: Cell) -> str:
    return cell["model"] if "model" in cell else f"hidden {cell['hidden']}"


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Seconds of every timed update by method, and the median seconds of its parts."""
    batches = _batches(cell, options)
    methods = {name: _build(name, cell, options) for name in options.methods}
    once: dict[str, float] = {}
    for name, method in methods.items():  # the first update allocates, and GaLore's computes its projections
        once[name] = sum(_update(method, batches).values())
    seconds: dict[str, list[dict[str, float]]] = defaultdict(list)
    order = list(methods)
    for index in range(options.num_rounds):
        for name in order[index % len(order) :] + order[: index % len(order)]:
            gc.collect()
            seconds[name].append(_update(methods[name], batches))
    return {
        name: {
            "update_s": [sum(parts.values()) for parts in timed],
            "phases_s": {part: statistics.median(parts.get(part, 0.0) for parts in timed) for part in timed[0]},
            "first_update_s": once[name],
        }
        for name, timed in seconds.items()
    }


def table(results: Results) -> str:
    """Times and ratios, then the parts of an update."""
    settings = results.settings
    whole = f", or {SMOLLM2}, rank {SMOLLM2_RANK}" if any("model" in record.cell for record in results.records) else ""
    intro = (
        f"{settings['num_layers']} block(s), rank {settings['rank']}{whole}; responses of {settings['num_tokens']} generated "
        f"tokens; fp32; median (range) of {settings['num_rounds']} rounds. "
        "The trust region reads at least 128 tokens and 2 responses, however many there are."
    )
    speed, parts = [], []
    for record in sorted(results.records, key=lambda record: _order(record.cell)):
        for method, title in METHODS.items():
            if method in record.result:
                found = record.result[method]
                times = found["update_s"]
                ratio = speedups(record.result)[method]
                size = [str(record.cell["num_responses"]), str(record.cell["micro_batch_size"])]
                row = [_name(record.cell), *size, title]
                speed.append([*row, _median_spread(times), _median_spread(ratio)])
                parts.append([*row, *(f"{found['phases_s'].get(part, 0.0):.3f}" for part in PARTS)])
    header = ["model", "responses", "per micro-batch", "method"]
    return "\n\n".join(
        [
            intro,
            markdown_table([*header, "s / update", "times as fast as dense AdamW"], speed),
            markdown_table([*header, *PARTS.values()], parts),
        ]
    )


def _order(cell: Cell) -> tuple[float, int, int]:
    return cell.get("hidden", math.inf), cell["num_responses"], -cell["micro_batch_size"]


def ratios(results: Results) -> dict[str, Ratio]:
    """How many times as fast as dense AdamW `logra` and `paper` are, in each cell."""
    return {
        f"{method} against adamw, {_name(record.cell)}, {record.cell['num_responses']} responses by "
        f"{record.cell['micro_batch_size']}": Ratio(statistics.median(found), "higher")
        for record in results.records
        for method, found in speedups(record.result).items()
        if method in ("logra", "paper")
    }


def speedups(result: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of dense AdamW over those of each method, round by round; GaLore's with their share of its SVDs."""
    dense = result["adamw"]["update_s"]
    found = {}
    for method, timed in result.items():
        # GaLore's SVDs were in the first update, which is not among the timed ones.
        svds = max(timed["first_update_s"] - statistics.median(timed["update_s"]), 0.0)
        extra = svds / GALORE_GAP if method == "galore" else 0.0
        found[method] = [base / (own + extra) for base, own in zip(dense, timed["update_s"], strict=True)]
    return found


PARTS = {
    "forward": "forward, s",
    "backward": "backward, s",
    "recover": "recovery and clip, s",
    "probe": "trust region, s",
    "update": "the rest of the step, s",
}


def _median_spread(values: list[float]) -> str:
    return (
        f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else spread(values)
    )


# ---- one update ----


def _update(method: Method, batches: list[Tensor]) -> dict[str, float]:
    """Seconds of one update by part."""
    clock = _Clock()
    for tokens in batches:
        logits = method.model(input_ids=tokens).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / len(batches)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        del logits, loss
    with phases.listening(lambda: clock.lap(phases.current_phase() or "update")):
        method.step(batches)
    clock.lap("update")
    return dict(clock.seconds)


class _Clock:
    """Adds up laps. One CPU thread: the seconds it ran. Otherwise: the seconds that passed."""

    def __init__(self) -> None:
        self._is_cuda = torch.cuda.is_available()
        alone = torch.get_num_threads() == 1 and not self._is_cuda
        self._now: Callable[[], float] = time.process_time if alone else time.perf_counter
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = self._read()

    def lap(self, name: str) -> None:
        """What has passed since the last lap belongs to `name`."""
        now = self._read()
        self.seconds[name] += now - self._last
        self._last = now

    def _read(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return self._now()


# ---- the methods ----


def _batches(cell: Cell, options: Options) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (cell["num_responses"], 1 + options.num_tokens)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
    return list(tokens.split(cell["micro_batch_size"]))


def _model(cell: Cell, num_layers: int) -> Any:
    """SmolLM2, or blocks of a small Llama; only the targets of `logra` are trained, by every method."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if "model" in cell:
        from logra.rl.default_model import default_model_path

        model: Any = AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32)
    else:
        torch.manual_seed(0)
        hidden = cell["hidden"]
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden // HEAD_WIDTH,
            num_key_value_heads=hidden // HEAD_WIDTH,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        model.enable_input_require_grads()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("_proj.weight"))
    return model


def _build(name: str, cell: Cell, options: Options) -> Method:
    model, rank = _model(cell, options.num_layers), SMOLLM2_RANK if "model" in cell else options.rank
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        targets = list(logra.Config().target_modules)
        model = get_peft_model(model, LoraConfig(r=rank, target_modules=targets, lora_dropout=0.0))
    if name in ("logra", "paper"):
        return _Sketched(model, name, rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "galore":
        try:
            optimizer_class = importlib.import_module("galore_torch").GaLoreAdamW
        except ModuleNotFoundError as error:
            raise ConfigError(f"methods: galore needs the package {error.name}: pip install 'logra[bench]'") from error
        group = {
            "params": trained,
            "rank": rank,
            "update_proj_gap": GALORE_GAP,
            "scale": 0.25,
            "proj_type": "std",
        }
        return _Dense(model, optimizer_class([group], lr=1e-5, no_deprecation_warning=True), trained)
    return _Dense(model, torch.optim.AdamW(trained, lr=1e-5, fused=True), trained)


class _Dense:
    """An optimizer of `.grad`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
        self.model, self._optimizer, self._trained = model, optimizer, trained

    def step(self, batches: list[Tensor]) -> None:
        """Clip and step."""
        with phases.phase("recover"):
            nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Sketched:
    """A SketchOptimizer with a trust region."""

    def __init__(self, model: nn.Module, name: str, rank: int) -> None:
        paper = {"sketch": "one_sided", "direction": "row_adam", "restore_norm": True, "momentum": 0.0}
        settings: dict[str, Any] = paper if name == "paper" else {}
        trust = logra.TrustRegion(kl_budget=1e-3)
        self.model = model
        self._optimizer = logra.SketchOptimizer(model, rank=rank, lr=1e-4, max_grad_norm=1.0, trust=trust, **settings)

    def step(self, batches: list[Tensor]) -> None:
        """Price, scale, check and merge."""
        tokens = torch.cat(batches)
        mask = torch.ones_like(tokens)
        generated = mask.clone()
        generated[:, 0] = 0
        self._optimizer.set_probe(input_ids=tokens, attention_mask=mask, loss_mask=generated)
        self._optimizer.step()
        self._optimizer.zero_grad()
        assert self._optimizer.last_update is not None, self._optimizer.last_skip
