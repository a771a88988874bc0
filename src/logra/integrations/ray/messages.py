"""What the trainer's side and the workers of a fleet say to each other: plain numbers and texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """

    token_ids: list[int]
    version: int


@dataclass(frozen=True)
class Answer:
    """What a worker made of one group.

    Attributes:
        version: of the worker's policy.
        samples: of the group; none if the worker is not at the version that was asked for.
        catch_up_s: time that applying updates took before it, seconds.
    """

    version: int
    samples: Sequence[Sample]
    catch_up_s: float


@dataclass(frozen=True)
class Status:
    """Where a worker runs, and what it holds.

    Attributes:
        pid: its process.
        node: the machine's name.
        version: of its policy.
    """

    pid: int
    node: str
    version: int


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker loads and samples.

    Attributes:
        model: folder or hub id of the base model.
        dtype: of its parameters, a name of torch.
        storage: of the replica.
        generation: arguments of transformers' `GenerationConfig`.
        num_threads: of torch.
        on_gpu: sample on the GPU that Ray gave to the worker.
        autocast: forward in bfloat16 where the parameters are fp32, as the trainer does.
        attention: name of the attention implementation.
    """

    model: str
    dtype: str = "float32"
    storage: Storage = "fp32"
    generation: dict[str, Any]
    num_threads: int = 1
    on_gpu: bool = False
    autocast: bool = False
    attention: str | None = None
