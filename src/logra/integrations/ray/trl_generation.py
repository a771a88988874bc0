"""TRL's generation with a fleet of Ray actors.

`logra.rl.GRPOTrainer(workers=WorkersConfig(...), args=GRPOConfig(use_vllm=True, ...))` uses it: TRL then asks an engine for
completions where it would otherwise sample with the model that it trains. With transformers inside, the workers hold the
same weights to the bit and run the same generation: TRL's correction for another engine's probabilities has nothing to
correct, and is refused. With vLLM inside it works as with any vLLM engine.

Random numbers: each call draws one number from torch's generator, which `logra train` seeds for every step, and the group
at place i of the call is drawn from the seed (that number, i).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from logra.errors import ConfigError
from logra.hashing import derive_key
from logra.integrations.ray.fleet import Fleet
from logra.integrations.ray.messages import Group, WorkerSettings
from logra.integrations.ray.pool import RayPool, require_ray
from logra.rl.workers import WorkersConfig
from logra.sync.protocols import PolicyOptimizer, UpdateLog
from logra.update import PolicyUpdate


class FleetGeneration:
    """In the place of TRL's `VLLMGeneration`; the workers are started by the first generation.

    Args:
        model, accelerator, processing_class, temperature, top_p, top_k, min_p, repetition_penalty, max_completion_length,
            max_model_length, generation_kwargs, structured_outputs_regex: as TRL gives them.
        workers: the fleet.
        **_: what TRL has to say to vLLM alone.

    Raises:
        ConfigError: several processes train, outputs are to follow a pattern, or settings of transformers' generation are
            meant for vLLM.
    """

    def __init__(
        self,
        *,
        model: Any,
        accelerator: Any,
        processing_class: Any,
        workers: WorkersConfig,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float | None,
        repetition_penalty: float,
        max_completion_length: int,
        max_model_length: int | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        structured_outputs_regex: str | None = None,
        **_: Any,
    ) -> None:
        if accelerator.num_processes > 1:
            raise ConfigError(
                f"a fleet of rollout workers serves one training process; {accelerator.num_processes} train here"
            )
        if structured_outputs_regex is not None:
            raise ConfigError(
                f"vllm_structured_outputs_regex={structured_outputs_regex!r}: rollout workers do not know it"
            )
        if generation_kwargs and workers.engine == "vllm":
            raise ConfigError(
                f"generation_kwargs={generation_kwargs!r}: workers do not pass them on to vLLM; leave them out"
            )
        self._model, self._workers, self._max_model_len = model, workers, max_model_length
        self._autocast = accelerator.mixed_precision == "bf16"
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self._generation = {
            "max_new_tokens": max_completion_length,
            "do_sample": True,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": _end_tokens(model, tokenizer),
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            **(generation_kwargs or {}),
        }
        self._find: Callable[[], tuple[PolicyOptimizer, UpdateLog | None]] | None = None
        self.fleet: Fleet | None = None
        """The workers; None before the first generation."""
        self.sampled_version: int | None = None
        """Version that sampled the last completions."""

    def follow(self, find: Callable[[], tuple[PolicyOptimizer, UpdateLog | None]]) -> None:
        """Say whose weights the workers shall have; see `logra.rl.rollout`."""
        self._find = find

    def add(self, update: PolicyUpdate | None) -> None:
        """Do nothing: the workers read the log."""

    def metrics(self) -> dict[str, float]:
        """Of the last generation: seconds of the slowest catch-up; and how much was refused and lost so far."""
        if self.fleet is None:
            return {}
        return {
            "sync/seconds": self.fleet.catch_up_s,
            "rollout/refused_samples": float(self.fleet.num_refused),
            "rollout/lost_workers": float(self.fleet.num_lost),
        }

    def close(self) -> None:
        """End the workers; the next generation starts others."""
        if self.fleet is not None:
            self.fleet.close()
        self.fleet = None

    # ---- what TRL calls ----

    def sync_weights(self) -> None:
        """Do nothing: every request names its version, and workers catch up before they serve it."""

    def generate(self, prompts: Sequence[Sequence[int]], images: Any, num_generations: int, profiler: Any) -> tuple:
        """Completions of the prompts, in their order, all of the optimizer's version.

        Args:
            prompts: token ids, equal ones in succession as TRL repeats them.
            images: None.
            num_generations: not needed.
            profiler: a context manager around the generation.

        Returns:
            None, token ids, log-probabilities (NaN where the engine does not measure them), None: TRL's four values.

        Raises:
            ConfigError: images, or a trainer without a log of updates.
            SyncError: see `Fleet.sample`.
        """
        if images is not None:
            raise ConfigError("rollout workers take text prompts only, and these have images")
        if self._find is None:
            raise ConfigError("FleetGeneration: call follow(...) before the first generation")
        optimizer, log = self._find()
        if log is None:
            raise ConfigError(
                "workers: they follow the log of updates, and this trainer has none: call publish_to(publisher) first"
            )
        if self.fleet is None:
            self.fleet = self._start(optimizer, log)
        seed = int(torch.randint(2**62, ()))
        groups = [
            Group(tuple(ids), len(list(copies)), derive_key("group", seed, index) % 2**63)
            for index, (ids, copies) in enumerate(itertools.groupby(prompts))
        ]
        with profiler:
            samples = self.fleet.sample(groups, optimizer.version)
        self.sampled_version = optimizer.version
        completions = [sample.token_ids for sample in samples]
        log_probs = [sample.log_probs or [float("nan")] * len(sample.token_ids) for sample in samples]
        return None, completions, [[[value] for value in values] for values in log_probs], None

    def _start(self, optimizer: PolicyOptimizer, log: UpdateLog) -> Fleet:
        workers = self._workers
        settings = WorkerSettings(
            engine=workers.engine,
            model=workers.model,
            dtype=str(self._model.dtype).removeprefix("torch."),
            storage=optimizer.config.weight_storage,
            generation=self._generation,
            num_threads=workers.num_threads,
            on_gpu=workers.num_gpus > 0,
            autocast=self._autocast,
            attention=self._model.config._attn_implementation,
            max_model_len=self._max_model_len,
        )
        pool = RayPool(
            settings,
            log,
            num_workers=workers.num_workers,
            num_gpus=workers.num_gpus,
            max_restarts=workers.max_restarts,
        )
        return Fleet(pool, timeout_s=workers.timeout_s, in_shares=workers.engine == "vllm")


def generation_class() -> type[FleetGeneration]:
    """Entry point of the group `logra.rollout_engines`.

    Raises:
        ConfigError: Ray is not installed.
    """
    require_ray()
    return FleetGeneration


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: those that the model declares, and the tokenizer's."""
    declared = model.generation_config.eos_token_id
    ends = set(declared if isinstance(declared, list) else [declared]) | {tokenizer.eos_token_id}
    return sorted(end for end in ends if end is not None)
