"""Settings of a fleet of rollout workers: processes elsewhere that follow the log of updates and sample."""

from dataclasses import dataclass
from typing import Literal

from logra.rl.checks import require_choices, require_integer, require_number


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """A fleet of rollout workers, see `logra.integrations.ray`.

    With engine transformers, samples depend on none of these but `model` and `num_threads` (and on the kind of a GPU).
    """

    model: str
    """Folder or hub id of the base model of the run, as every worker finds it."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What samples inside a worker."""
    num_workers: int = 1
    """Workers, each with a copy of the policy."""
    num_threads: int = 1
    """CPU cores that a worker reserves, and threads of its torch."""
    num_gpus: float = 0.0
    """GPUs that a worker reserves; 0 samples on the CPU."""
    max_restarts: int = 10
    """Times that a worker is started again after it has died."""
    timeout_s: float = 600.0
    """Seconds without any answer after which the workers that are busy are started again, once."""

    def __post_init__(self) -> None:
        require_choices(self, "workers.")
        require_integer("workers.num_workers", self.num_workers, 1, "workers")
        require_integer("workers.num_threads", self.num_threads, 1, "threads of a worker")
        require_number("workers.num_gpus", self.num_gpus)
        require_integer("workers.max_restarts", self.max_restarts, 0, "restarts of a worker")
        require_number("workers.timeout_s", self.timeout_s, above=0)
