"""`logra.memory.plan`: what a training would take, without a GPU and without a model.

The answer is that of the real step, traced over fake tensors (`planner.step`), on one of the processes that share the
training. The engine that samples is not traced: its weights and its cache are stated beside the plan.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from logra.chunked_head import needs_chunks
from logra.errors import ConfigError, LograError
from logra.memory import Report
from logra.planner.models import load_config
from logra.planner.options import PlanOptions, check_methods, parse_memory
from logra.planner.step import trace


def plan(
    model: str,
    *,
    methods: str | Sequence[str] = ("logra", "adamw", "lora", "paper"),
    gpu_memory: str | int | None = None,
    num_processes: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Bytes per GPU by category, for every method.

    Args:
        model: a preset (`logra.planner.models.PRESETS`), the path of a config.json, or a folder that holds one.
        methods: some of logra, adamw, lora, paper.
        gpu_memory: memory of a GPU with its unit, such as "80GB"; None does not compare.
        num_processes: methods traced at the same time, at least 1. With more than 1 each has a process of its own, for which
            the calling script needs an `if __name__ == "__main__"`.
        **settings: fields of `PlanOptions`: num_gpus, seq_len, prompt_len, micro_batch, precision, rank, weight_storage, ...

    Returns:
        {"model", "num_gpus", "num_parameters", "options", "assumptions", "methods": {NAME: {"peak_bytes", "peak_phase",
        "at_peak": {category: bytes}, "resident": {category: bytes between steps}, "phases", "fits", ...}}}. `fits` is None
        without `gpu_memory`; with it, `spare_bytes` is what is left (negative: what is missing), and `largest_micro_batch`
        or, where not even one sequence fits, `largest_seq_len` is what fits. Of several methods, one that cannot be planned
        (its step cannot be traced, or would be refused where it runs) is {"refused": why, "fits": None}.

    Raises:
        ConfigError: an unknown model or method, a value that is not allowed, more GPUs than rows to share, or several
            methods of which none can be planned.
        LograError: the only method cannot be planned.

    Example:
        >>> logra.memory.plan("qwen2.5-7b", num_gpus=4, methods="logra", gpu_memory="80GB")["methods"]["logra"]["fits"]
        True
    """
    chosen = check_methods(methods)
    if num_processes < 1:
        raise ConfigError(f"num_processes={num_processes!r}: at least 1")
    limit = None if gpu_memory is None else parse_memory(gpu_memory)
    try:
        options = PlanOptions(**settings)
    except TypeError as error:
        raise ConfigError(f"plan: {error}. Allowed: {', '.join(PlanOptions.__annotations__)}") from error
    config = load_config(model)
    _check_rows(config, options)
    outcomes = _traced(config, chosen, options, min(num_processes, len(chosen)))
    _require_any(outcomes)
    return {
        "model": model,
        "num_gpus": options.num_gpus,
        "options": {name: getattr(options, name) for name in PlanOptions.__annotations__},
        "assumptions": assumptions(config, options),
        "methods": {
            method: _result(outcome, options, limit, int(config.vocab_size)) for method, outcome in outcomes.items()
        },
    }


def _traced(
    config: Any, methods: Sequence[str], options: PlanOptions, num_processes: int
) -> dict[str, Report | LograError]:
    if num_processes == 1:
        return {method: _outcome(config, method, options) for method in methods}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        waiting = {method: pool.submit(_outcome, config, method, options) for method in methods}
        return {method: future.result() for method, future in waiting.items()}


def _outcome(config: Any, method: str, options: PlanOptions) -> Report | LograError:
    """The report of a method, or the error that refuses it: the other methods are planned all the same."""
    try:
        return trace(config, method, options)
    except LograError as error:
        return error


def _require_any(outcomes: dict[str, Report | LograError]) -> None:
    refused = {method: outcome for method, outcome in outcomes.items() if isinstance(outcome, LograError)}
    if len(refused) < len(outcomes):
        return
    if len(refused) == 1:
        raise next(iter(refused.values()))
    reasons = "; ".join(f"{method}: {error}" for method, error in refused.items())
    raise ConfigError(f"none of the methods can be planned. {reasons}")


def _check_rows(config: Any, options: PlanOptions) -> None:
    """FSDP2 shards rows; a process without any has nothing to train."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = min(config.hidden_size, heads * width)
    if options.num_gpus > rows:
        raise ConfigError(
            f"num_gpus={options.num_gpus}: more than the {rows} rows of the smallest weight of this model, which are shared "
            f"over the GPUs"
        )


def assumptions(config: Any, options: PlanOptions) -> dict[str, int]:
    """What the rollout engine takes beside the training, in bytes: its weights in bf16, and keys and values of a token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries = config.num_attention_heads * width
    per_layer = hidden * (2 * queries + 2 * heads * width) + 3 * hidden * inner
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return {
        "rollout_weights_bytes": 2 * (layers * per_layer + embeddings),
        "rollout_kv_cache_bytes_per_token": 2 * 2 * layers * heads * width,
        "rollout_kv_cache_bytes_per_sequence": 2 * 2 * layers * heads * width * options.seq_len,
    }


def _result(report: Report | LograError, options: PlanOptions, limit: int | None, vocabulary: int) -> dict[str, Any]:
    if isinstance(report, LograError):
        return {"refused": str(report), "fits": None}
    result = report.to_dict() | {"fits": None}
    if limit is None:
        return result
    result |= {"fits": report.peak_bytes <= limit, "spare_bytes": limit - report.peak_bytes}
    logits_grow = not options.chunked_logits or not needs_chunks(options.num_scored_tokens, vocabulary)
    times = _times_the_tokens(report, limit, logits_grow)
    micro_batch = int(options.micro_batch * times)
    if micro_batch >= 1:
        return result | {"largest_micro_batch": micro_batch}
    # A multiple of 64 tokens, as padded batches are.
    return result | {"largest_seq_len": int(options.seq_len * options.micro_batch * times) // 64 * 64}


def _times_the_tokens(report: Report, limit: int, logits_grow: bool) -> float:
    """How many times the tokens of the plan's micro-batch fit.

    Activations and what the rollout left grow with tokens, logits up to the size of a chunk.
    """
    ratios = []
    for name in ("forward", "backward"):
        peak = report.phases[name]
        growing = peak.at_peak["activations"] + peak.at_peak["rollout"] + logits_grow * peak.at_peak["logits"]
        ratios.append((limit - peak.peak_bytes + growing) / max(growing, 1))
    others = (peak.peak_bytes for name, peak in report.phases.items() if name not in ("forward", "backward"))
    return 0.0 if max(others, default=0) > limit else max(min(ratios), 0.0)
