"""Rollout engines that sample in the trainer's place, found by name, so that this package imports none of them.

An engine is a class in the place of TRL's `VLLMGeneration`, named by an entry point of the group `logra.rollout_engines`.
Besides TRL's methods it has

    follow(find)              find() returns the optimizer whose weights it shall have, and the log of its updates or None
    add(update)               an update that the optimizer has applied (None: a skipped step)
    last_delivery             version, num_bytes and seconds of the last synchronisation; None before the first
    sampled_version           version that sampled the last completions
    num_anchors               times that updates did not suffice and full weights were sent
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from trl.trainer import grpo_trainer

from logra.errors import ConfigError

GROUP = "logra.rollout_engines"


@contextmanager
def rollout_engine(args: Any) -> Iterator[None]:
    """Inside, TRL's trainer builds the engine of `logra` where `args.use_vllm` asks for one.

    Raises:
        ConfigError: vLLM or the entry point is missing, or the engine would have to forget its weights.
    """
    if args is None or not args.use_vllm:
        yield
        return
    if args.vllm_enable_sleep_mode:
        raise ConfigError(
            "vllm_enable_sleep_mode=True: TRL drops the engine's weights after every generation (sleep level 2), so that "
            "no update could be applied to them. Set it to False"
        )
    found = list(entry_points(group=GROUP, name="vllm"))
    if not found:
        raise ConfigError("use_vllm=True: the entry points of logra are missing. Run: pip install 'logra[vllm]'")
    module: Any = grpo_trainer
    original = module.VLLMGeneration
    module.VLLMGeneration = found[0].load()()
    try:
        yield
    finally:
        module.VLLMGeneration = original


def delivery_metrics(generation: Any) -> dict[str, float]:
    """Metrics of the last synchronisation of an engine; none on a process that has not synchronised."""
    delivery = generation.last_delivery
    if delivery is None:
        return {}
    return {
        "sync/delivered_bytes": float(delivery.num_bytes),
        "sync/seconds": delivery.seconds,
        "sync/anchors": float(generation.num_anchors),
    }
