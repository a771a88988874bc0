"""`logra plan`: memory per GPU by category, for a model that need not be there."""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from logra.errors import LograError
from logra.memory.categories import SHAPE_CALCULATION
from logra.memory.table import method_table, readable
from logra.merge_rule import WEIGHT_STORAGES
from logra.planner.models import PRESETS
from logra.planner.options import METHODS, PlanOptions
from logra.planner.plan import plan

DESCRIPTION = (
    "Trace the training step of a model over fake tensors and say what it takes per GPU. Needs no GPU and downloads nothing. "
    f"Presets: {', '.join(PRESETS)}."
)


def plan_command(arguments: Sequence[str]) -> int:
    """Run `logra plan`; returns the exit code, 1 where a method does not fit, or one that the user named is refused.

    Raises:
        LograError: see `logra.memory.plan`.
    """
    options = _parser().parse_args(list(arguments))
    result = plan(
        options.model,
        methods=options.method,
        gpu_memory=options.gpu_memory,
        num_processes=_num_cores(),
        num_gpus=options.num_gpus,
        seq_len=options.seq_len,
        prompt_len=options.prompt_len,
        micro_batch=options.micro_batch,
        precision=options.precision,
        rank=options.rank,
        weight_storage=options.weight_storage,
        activation_checkpointing=not options.no_activation_checkpointing,
        chunked_logits=not options.whole_logits,
        use_trust=not options.no_trust,
        every_layer=options.every_layer,
    )
    print(json.dumps(result, indent=2) if options.json else text(result))
    was_named = options.method is not METHODS  # argparse hands over the default itself
    found = result["methods"].values()
    return int(any(method["fits"] is False or (was_named and "refused" in method) for method in found))


def text(result: dict[str, Any]) -> str:
    """The plan as a person reads it."""
    settings, assumed = result["options"], result["assumptions"]
    lines = [
        f"{result['model']} on {result['num_gpus']} GPU(s), {settings['micro_batch']} x {settings['seq_len']} tokens, "
        f"{settings['precision']} compute. Bytes per GPU:",
        "",
        method_table(result["methods"]),
        "",
    ]
    for name, method in result["methods"].items():
        if "refused" in method:
            lines.append(f"{name}: refused. {method['refused']}")
        if method["fits"] is None:
            continue
        spare = method["spare_bytes"]
        verdict = f"fits, {readable(spare)} to spare" if method["fits"] else f"does not fit, {readable(-spare)} missing"
        largest = (
            f"largest micro-batch: {method['largest_micro_batch']}"
            if "largest_micro_batch" in method
            else f"largest sequence: {method['largest_seq_len']} tokens"
            if method["largest_seq_len"]
            else "no sequence is short enough"
        )
        lines.append(f"{name}: {verdict}; {largest}")
    too_large = [name for name, method in result["methods"].items() if method["fits"] is False]
    if too_large:
        lines.append(f"To need less: {', '.join(_savings(result, too_large))}.")
    lines += [
        f"Not in it: a rollout engine's weights ({readable(assumed['rollout_weights_bytes'])} in bf16) and cache "
        f"({readable(assumed['rollout_kv_cache_bytes_per_sequence'])} per sequence), the CUDA "
        f"context, and what an allocator loses.",
        SHAPE_CALCULATION,
    ]
    return "\n".join(lines)


def _savings(result: dict[str, Any], methods: Sequence[str]) -> list[str]:
    """What would make these methods take less memory than with the planned options."""
    options, sketched = result["options"], {"logra", "paper"} & set(methods)
    can_save = {
        "leave out --no-activation-checkpointing": not options["activation_checkpointing"],
        "leave out --whole-logits": not options["chunked_logits"],
        "--precision bf16": options["precision"] == "fp32",
        f"--weight-storage split24 ({', '.join(sorted(sketched))})": sketched
        and options["weight_storage"] != "split24",
        "--method logra": "logra" not in result["methods"],
        "a smaller --micro-batch": options["micro_batch"] > 1,
        "a shorter --seq-len": any(result["methods"][name].get("largest_seq_len") for name in methods),
        "more --num-gpus": True,
        "a smaller model": True,
    }
    return [what for what, saves in can_save.items() if saves]


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise LograError(f"{message}. See logra plan --help")


def _parser() -> argparse.ArgumentParser:
    default = PlanOptions()
    parser = _Parser(prog="logra plan", description=DESCRIPTION, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="preset, path of a config.json, or folder that holds one")
    parser.add_argument("--method", nargs="+", default=METHODS, help="methods to plan")
    parser.add_argument("--num-gpus", type=int, default=default.num_gpus, help="GPUs that share weights (FSDP2)")
    parser.add_argument("--seq-len", type=int, default=default.seq_len, help="tokens of prompt and completion")
    parser.add_argument("--prompt-len", type=int, help="tokens of the prompt (default: a quarter of --seq-len)")
    parser.add_argument("--micro-batch", type=int, default=default.micro_batch, help="sequences per pass and GPU")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default=default.precision, help="of the compute")
    parser.add_argument("--rank", type=int, help="of sketches or adapters (default: the method's own)")
    parser.add_argument(
        "--weight-storage", choices=WEIGHT_STORAGES, default=default.weight_storage, help="of the sketched methods"
    )
    parser.add_argument("--no-activation-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--whole-logits", action="store_true", help="make the logits of all tokens at once")
    parser.add_argument("--no-trust", action="store_true", help="do not price the step on a probe")
    parser.add_argument("--every-layer", action="store_true", help="trace every layer: minutes, same result")
    parser.add_argument("--gpu-memory", help="memory of a GPU with its unit, such as 80GB or 74.5GiB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
