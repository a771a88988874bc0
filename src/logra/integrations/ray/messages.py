"""What the trainer's side and the workers of a fleet say to each other: plain numbers and texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from logra.sync.fit import Storage


@dataclass(frozen=True)
class Group:
    """A prompt and the samples wanted of it.

    Attributes:
        prompt_ids: token ids, at least one.
        num_samples: completions to draw, at least 1.
        seed: of the random numbers of this group, 0 to 2^63 - 1.
    """

    prompt_ids: tuple[int, ...]
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        token_ids: up to and with the end-of-sequence token, if it was drawn.
        version: of the policy that drew it.
        log_probs: of the tokens, in the distribution that they were drawn from, nats; None where the engine does not
            measure them.
    """

    token_ids: list[int]
    version: int
    log_probs: list[float] | None = None


@dataclass(frozen=True)
class Answer:
    """What a worker made of one request.

    Attributes:
        version: of the worker's policy.
        samples: of its groups, in order; none if the worker is not at the version that was asked for.
        catch_up_s: time that applying updates took before it, seconds.
    """

    version: int
    samples: Sequence[Sample]
    catch_up_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker loads and samples.

    Attributes:
        engine: what samples inside the worker.
        model: folder or hub id of the base model.
        dtype: of the trainer's parameters, a name of torch.
        storage: of a replica of them (engine transformers).
        generation: arguments of transformers' `GenerationConfig`.
        num_threads: of torch.
        on_gpu: sample on the GPU that Ray gave to the worker.
        autocast: the trainer's forward runs in bfloat16, whatever its parameters.
        attention: name of the attention implementation (engine transformers).
        max_model_len: longest sequence, tokens (engine vllm); None leaves it to the model.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    model: str
    dtype: str = "float32"
    storage: Storage = "fp32"
    generation: dict[str, Any]
    num_threads: int = 1
    on_gpu: bool = False
    autocast: bool = False
    attention: str | None = None
    max_model_len: int | None = None
