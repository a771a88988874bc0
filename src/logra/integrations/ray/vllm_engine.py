"""`VLLMSampler`: a vLLM engine inside a worker, which applies the updates in place (`logra.integrations.vllm`).

All groups of a request are sampled together, each from its own seed. What else is in a batch changes the last bits of
vLLM's probabilities, so that another number of workers can draw other samples.
"""

import os
from collections.abc import Sequence
from typing import Any

from logra.integrations.ray.messages import Group, WorkerSettings
from logra.integrations.vllm import VLLMEngine, engine_options
from logra.sync import Manifest
from logra.sync.protocols import UpdateLog


class VLLMSampler:
    """See `logra.integrations.ray.worker.Engine`.

    Args:
        settings: how it loads and samples. The engine computes in the dtype of the trainer's forward pass.
        manifest: of the run.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(self, settings: WorkerSettings, manifest: Manifest) -> None:
        options = engine_options()
        # The engine lives in the worker's own process, and dies with it.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        self._llm = LLM(
            model=settings.model,
            dtype="bfloat16" if settings.autocast else settings.dtype,
            max_model_len=settings.max_model_len,
            enforce_eager=not settings.on_gpu,  # compiling takes minutes on a CPU, and gains nothing with plain weights
            logprobs_mode="processed_logprobs",
            **options,
        )
        self._client = VLLMEngine(self._llm)
        self._generation = settings.generation
        self.version = self._client.attach(manifest)
        """Of the weights."""

    def catch_up(self, log: UpdateLog, until: int) -> None:
        """See `Engine.catch_up`."""
        if until == self.version:
            return
        for update in log.read_since(self.version):
            self.version = self._client.push(update)
            if self.version == until:
                return

    def draw(self, groups: Sequence[Group]) -> list[tuple[list[int], list[float]]]:
        """See `Engine.draw`."""
        prompts = [{"prompt_token_ids": list(group.prompt_ids)} for group in groups]
        requests = self._llm.generate(prompts, [self._parameters(group) for group in groups], use_tqdm=False)
        return [
            (list(output.token_ids), [next(iter(entry.values())).logprob for entry in output.logprobs])
            for request in requests
            for output in sorted(request.outputs, key=lambda output: output.index)
        ]

    def _parameters(self, group: Group) -> Any:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        settings = self._generation
        shared = {name: settings[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        return SamplingParams(
            n=group.num_samples,
            seed=group.seed,
            max_tokens=settings["max_new_tokens"],
            min_p=settings["min_p"] or 0.0,
            stop_token_ids=settings["eos_token_id"],
            logprobs=0,
            **shared,
        )
