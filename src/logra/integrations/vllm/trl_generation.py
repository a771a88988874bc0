"""TRL's generation with vLLM, with the few bytes of an update in the place of all weights.

`logra.rl.GRPOTrainer` uses it for `use_vllm=True`, in both of TRL's modes:

    colocate   TRL's own `vllm.LLM`, built so that it follows updates
    server     `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "logra"}'`

Sampling, prompts and log-probabilities are TRL's. The trainer refuses `vllm_enable_sleep_mode`: TRL's sleep drops the
weights after every generation, and there would be nothing left to update.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from logra.errors import ConfigError, SyncError
from logra.integrations.vllm.client import Delivery, EngineClient
from logra.integrations.vllm.engine import VLLMEngine, engine_options, require_vllm
from logra.integrations.vllm.follower import Follower
from logra.integrations.vllm.server import VLLMServer
from logra.sync.protocols import PolicyOptimizer, UpdateLog
from logra.update import PolicyUpdate


class FollowingGeneration(VLLMGeneration):
    """`VLLMGeneration` whose engine follows a `SketchOptimizer`.

    Takes TRL's arguments.

    Raises:
        ConfigError: an engine that cannot follow.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._follower: Follower | None = None
        self._find: Callable[[], tuple[PolicyOptimizer, UpdateLog | None]] | None = None
        self._engine: EngineClient | None = None
        self.last_delivery: Delivery | None = None
        """What the last synchronisation took; None before the first."""
        self.sampled_version: int | None = None
        """Version that sampled the last completions."""
        super().__init__(*args, **kwargs)

    def follow(self, find: Callable[[], tuple[PolicyOptimizer, UpdateLog | None]]) -> None:
        """Say whose weights the engine shall have.

        Args:
            find: returns the optimizer, and the log that its updates are published in (None without one); called with
                the first generation.
        """
        self._find = find

    def add(self, update: PolicyUpdate | None) -> None:
        """Remember an update that the optimizer has just applied, for the next synchronisation."""
        if self._follower is not None:
            self._follower.add(update)

    def metrics(self) -> dict[str, float]:
        """Of the last synchronisation; none on a process that has not synchronised."""
        if self.last_delivery is None or self._follower is None:
            return {}
        return {
            "sync/delivered_bytes": float(self.last_delivery.num_bytes),
            "sync/seconds": self.last_delivery.seconds,
            "sync/anchors": float(self._follower.num_anchors),
        }

    def close(self) -> None:
        """Do nothing: an engine of this process ends with it, and a server is its owner's."""

    # ---- what TRL calls ----

    def sync_weights(self) -> None:
        """Bring the engine to the optimizer's version. In server mode the main process does it for all."""
        if self._engine is None:
            return
        if self._follower is None:
            if self._find is None:
                raise ConfigError("FollowingGeneration: call follow(...) before the first generation")
            self._follower = Follower(self._engine, *self._find())
        self.last_delivery = self._follower.sync()

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """TRL's generation; the version is compared before and after it.

        Raises:
            SyncError: the engine lost its weights while it sampled.
        """
        result = super().generate(*args, **kwargs)
        if self._engine is not None and self.last_delivery is not None:
            if self._engine.version() != self.last_delivery.version:
                raise SyncError(
                    f"the rollout engine lost version {self.last_delivery.version} while it sampled: what it returned "
                    f"comes from unknown weights"
                )
            self.sampled_version = self.last_delivery.version
        return result

    def _init_vllm(self) -> None:
        if self.mode == "server":
            if self.accelerator.is_main_process:
                url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
                self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
                self._engine = VLLMServer(url)
            self.accelerator.wait_for_everyone()
            return
        with _following_llm(self._dtype()):
            super()._init_vllm()
        self._engine = VLLMEngine(self.llm)

    def _dtype(self) -> str:
        """That of the trainer's forward pass, so that both compute with the same numbers."""
        if self.accelerator.mixed_precision == "bf16":
            return "bfloat16"
        return str(self.model.dtype).removeprefix("torch.")


def generation_class() -> type[FollowingGeneration]:
    """Entry point of the group `logra.rollout_engines`.

    Raises:
        ConfigError: vLLM is not installed.
    """
    require_vllm()
    return FollowingGeneration


@contextmanager
def _following_llm(dtype: str) -> Iterator[None]:
    """Inside, the `LLM` that TRL builds follows updates. TRL has no argument for it."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"dtype": dtype, **engine_options()}
    if current_platform.is_cpu():
        options["enforce_eager"] = True  # compiling takes minutes there, and gains nothing with plain weights
    module: Any = vllm_generation
    original = module.LLM
    module.LLM = partial(original, **options)
    try:
        yield
    finally:
        module.LLM = original
