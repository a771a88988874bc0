"""Rollout engines that sample in the trainer's place, found by name, so that this package imports none of them.

An engine is a class in the place of TRL's `VLLMGeneration`, named by an entry point of the group `logra.rollout_engines`:
"vllm" for vLLM, "ray" for a fleet of workers. Besides TRL's methods it has

    follow(find)              find() returns the optimizer whose weights it shall have, and the log of its updates or None
    add(update)               an update that the optimizer has applied (None: a skipped step)
    sampled_version           version that sampled the last completions
    metrics()                 of the last synchronisation, by the names of docs/vllm.md and docs/distributed.md
    close()                   give back what it holds outside of this process
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from trl.trainer import grpo_trainer

from logra.errors import ConfigError
from logra.rl.workers import WorkersConfig

GROUP = "logra.rollout_engines"


def engine_class(name: str) -> Any:
    """The class of an engine.

    Args:
        name: "vllm" or "ray".

    Raises:
        ConfigError: the entry point, or the package that the engine needs, is missing.
    """
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise ConfigError(
            f"the entry point {name!r} of the group {GROUP} is missing. Run: pip install 'logra[{name}]' (or install logra "
            f"again, if it is an older one)"
        )
    return found[0].load()()


@contextmanager
def rollout_engine(args: Any, workers: WorkersConfig | None = None) -> Iterator[None]:
    """Inside, TRL's trainer builds the engine of `logra` where `args.use_vllm` asks for one.

    Args:
        args: TRL's arguments.
        workers: of a fleet that takes the place of vLLM.

    Raises:
        ConfigError: the engine's package or entry point is missing, the engine would have to forget its weights, or
            workers are given that TRL would not ask, or whose samples it would correct.
    """
    if workers is not None and (args is None or not args.use_vllm):
        raise ConfigError("workers: TRL asks an engine only with GRPOConfig(use_vllm=True). Set it")
    if workers is not None and workers.engine == "transformers" and args.vllm_importance_sampling_correction:
        raise ConfigError(
            "vllm_importance_sampling_correction=True: the samples of these workers are the trainer's own, and come without "
            "log-probabilities to correct. Set it to False"
        )
    if args is None or not args.use_vllm:
        yield
        return
    if args.vllm_enable_sleep_mode:
        raise ConfigError(
            "vllm_enable_sleep_mode=True: TRL drops the engine's weights after every generation (sleep level 2), so that "
            "no update could be applied to them. Set it to False"
        )
    found = engine_class("vllm") if workers is None else partial(engine_class("ray"), workers=workers)
    module: Any = grpo_trainer
    original = module.VLLMGeneration
    module.VLLMGeneration = found
    try:
        yield
    finally:
        module.VLLMGeneration = original
