"""Tokens per second of a rollout on CPU: transformers, transformers with shared prompts, and vLLM.

A cell is one shape of rollout (8 prompts, 8 completions each, random tokens of SmolLM2 in fp32, temperature 1, every
completion at full length) and one alternative, which takes turns with plain transformers in one process. `vllm` needs an
environment with vLLM: `.venv-vllm/bin/logra bench rollout --ways vllm` after `make test-vllm`; `shared` needs the
transformers of `make test`.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logra.bench.harness import Cell, Ratio, Results, markdown_table, require_known, require_positive
from logra.rl.default_model import default_model_path

NUM_PROMPTS, NUM_SAMPLES = 8, 8
SHAPES: dict[str, tuple[int, int]] = {"default": (36, 12), "long prompts": (128, 12), "long completions": (36, 32)}
"""Name of a shape: tokens of a prompt, tokens of a completion."""
WAYS = {"shared": "each prompt run once for its completions", "vllm": "vLLM for CPU"}
_IDS = (100, 40_000)
"""Range of the random tokens: no special ones."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    shapes: tuple[str, ...] = tuple(SHAPES)
    """Shapes of rollouts."""
    ways: tuple[str, ...] = ("shared",)
    """Alternatives to plain transformers: shared, vllm."""
    num_repeats: int = 3
    """Rollouts of each kind; the median counts."""

    def __post_init__(self) -> None:
        require_known("shapes", self.shapes, SHAPES)
        require_known("ways", self.ways, WAYS)
        require_positive(self, "num_repeats")


CHECK = Options(shapes=("default",), num_repeats=2)
"""The rollouts whose ratio `make bench-check` compares."""


def cells(options: Options) -> list[Cell]:
    """Every shape with every alternative."""
    return [{"way": way, "shape": shape} for way in options.ways for shape in options.shapes]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Seconds of `num_repeats` rollouts with plain transformers and with the alternative, one each in turn."""
    num_prompt, num_new = SHAPES[cell["shape"]]
    prompts = torch.randint(*_IDS, (NUM_PROMPTS, num_prompt), generator=torch.Generator().manual_seed(0))
    generate = _transformers(shares=False)
    with _vllm(num_prompt + num_new) if cell["way"] == "vllm" else nullcontext(_transformers(shares=True)) as other:
        seconds = measure({"transformers": generate, cell["way"]: other}, prompts, num_new, options.num_repeats)
    return seconds | {"num_tokens": NUM_PROMPTS * NUM_SAMPLES * num_new}


def measure(
    ways: dict[str, Callable[[Tensor, int], int]], prompts: Tensor, num_new: int, num_repeats: int
) -> dict[str, Any]:
    """Seconds of rollouts, after one of each that is not counted.

    Args:
        ways: name -> function of prompts and the length of completions that returns how many tokens it made.
        prompts: int64 [prompts, tokens].
        num_new: tokens of a completion.
        num_repeats: rollouts of each way.

    Returns:
        For every name NAME_s, seconds that passed, and NAME_cpu_s, seconds that this process ran, [num_repeats] each.
    """
    expected = len(prompts) * NUM_SAMPLES * num_new
    seconds: dict[str, list[float]] = {f"{name}{clock}": [] for name in ways for clock in ("_s", "_cpu_s")}
    for repeat in range(num_repeats + 1):
        for name, generate in ways.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            num_tokens = generate(prompts, num_new)
            elapsed, cpu_elapsed = time.perf_counter() - start, time.process_time() - cpu_start
            if num_tokens != expected:
                raise RuntimeError(f"{name}: {num_tokens} tokens instead of {expected}")
            if repeat > 0:
                seconds[f"{name}_s"].append(elapsed)
                seconds[f"{name}_cpu_s"].append(cpu_elapsed)
    return seconds


def _transformers(*, shares: bool) -> Callable[[Tensor, int], int]:
    from transformers import AutoModelForCausalLM

    from logra.rl.shared_prompts import shared_prefill

    model: Any = AutoModelForCausalLM.from_pretrained(str(default_model_path()), dtype=torch.float32).eval()

    @torch.no_grad()
    def generate(prompts: Tensor, num_new: int) -> int:
        ids = prompts.repeat_interleave(NUM_SAMPLES, dim=0)
        settings = {
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "min_new_tokens": num_new,
            "max_new_tokens": num_new,
        }
        with shared_prefill(model) if shares else nullcontext():
            found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return found[:, ids.shape[1] :].numel()

    return generate


@contextmanager
def _vllm(num_tokens: int) -> Iterator[Callable[[Tensor, int], int]]:
    from logra.bench.transfer.engines import built_engine

    sizes = {"max_model_len": num_tokens + 1, "max_num_seqs": NUM_PROMPTS * NUM_SAMPLES, "kv_cache_memory_bytes": 2**30}
    with built_engine(default_model_path(), **sizes) as llm:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        def generate(prompts: Tensor, num_new: int) -> int:
            llm.reset_prefix_cache()  # the prompts of the last rollout are those of this one
            params = SamplingParams(
                n=NUM_SAMPLES,
                temperature=1.0,
                min_tokens=num_new,
                max_tokens=num_new,
                ignore_eos=True,
                detokenize=False,
            )
            requests = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
            found = llm.generate(requests, params, use_tqdm=False)
            return sum(len(completion.token_ids) for request in found for completion in request.outputs)

        yield generate


def table(results: Results) -> str:
    """Tokens per second of plain transformers beside each alternative, and how many times as fast that is."""
    rows = []
    for way, title in WAYS.items():
        for shape, (num_prompt, num_new) in SHAPES.items():
            for run in results.select(way=way, shape=shape):
                plain, other = (statistics.median(run[f"{name}_s"]) for name in ("transformers", way))
                ratios = [before / after for before, after in zip(run["transformers_s"], run[f"{way}_s"], strict=True)]
                speeds = (f"{run['num_tokens'] / seconds:.0f}" for seconds in (plain, other))
                spread = f"{plain / other:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                rows.append([f"{num_prompt} + {num_new}", title, *speeds, spread])
    header = ["tokens, prompt + completion", "way", "transformers, tokens/s", "this way, tokens/s", "times as fast"]
    return markdown_table(header, rows)


def ratios(results: Results) -> dict[str, Ratio]:
    """How many times as fast as plain transformers shared prompts are, by the seconds that the process ran."""
    return {
        f"shared prompts against transformers, {shape}": Ratio(
            statistics.median(
                before / after for before, after in zip(run["transformers_cpu_s"], run["shared_cpu_s"], strict=True)
            ),
            "higher",
        )
        for shape in SHAPES
        for run in results.select(way="shared", shape=shape)
    }
