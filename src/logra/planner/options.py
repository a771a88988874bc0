"""What is planned: sizes, method and storage, checked before anything is traced."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from logra.errors import ConfigError
from logra.optim import Config
from logra.trust import TrustRegion

Method = Literal["logra", "adamw", "lora", "paper"]
METHODS: tuple[str, ...] = get_args(Method)

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The training that is planned."""

    num_gpus: int = 1
    """GPUs that train, with weights sharded over them (FSDP2) where there are several."""
    seq_len: int = 2048
    """Tokens of a sequence, prompt and completion."""
    prompt_len: int | None = None
    """Tokens of the prompt; None is a quarter of seq_len."""
    micro_batch: int = 1
    """Sequences per forward and backward pass and GPU."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of forward and backward."""
    activation_checkpointing: bool = True
    """Keep one tensor per layer from forward, and run the layer again in backward."""
    chunked_logits: bool = True
    """Make logits that are many chunk by chunk (`logra.chunked_head`)."""
    rank: int | None = None
    """Rank of sketches (logra, paper) or adapters (lora); None is the method's own."""
    weight_storage: Literal["fp32", "split32", "split24"] = "fp32"
    """Of the sketched methods: 4, 4 or 3 bytes a weight."""
    use_trust: bool = True
    """Price the step on a probe (logra and paper)."""
    every_layer: bool = False
    """Trace every layer, instead of a few from which the others follow."""

    def __post_init__(self) -> None:
        for name in ("num_gpus", "seq_len", "micro_batch"):
            _require_count(name, getattr(self, name))
        if self.seq_len < 4:
            raise ConfigError(f"seq_len={self.seq_len!r}: at least 4 tokens")
        if self.prompt_len is not None:
            _require_count("prompt_len", self.prompt_len)
            if self.prompt_len >= self.seq_len:
                raise ConfigError(f"prompt_len={self.prompt_len!r}: must be below seq_len={self.seq_len}")
        if self.rank is not None:
            _require_count("rank", self.rank)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.seq_len // 4 if self.prompt_len is None else self.prompt_len

    @property
    def num_scored_tokens(self) -> int:
        """Tokens of a micro-batch whose log-probabilities the loss needs."""
        return self.micro_batch * (self.seq_len - self.num_prompt_tokens)

    def sketch_config(self, method: str) -> Config:
        """The settings of `SketchOptimizer` for the methods logra and paper, as `logra train` starts them."""
        # A budget that every step keeps: what is traced is a step that is taken.
        trust = TrustRegion(kl_budget=1.0, on_violation="warn") if self.use_trust else None
        settings: dict[str, Any] = {"weight_storage": self.weight_storage, "trust": trust}
        if self.rank is not None:
            settings["rank"] = self.rank
        config = Config.paper() if method == "paper" else Config(lr=1e-4)
        return replace(config, **settings)


def parse_memory(text: str | int) -> int:
    """Bytes of a size such as "80GB" (10^9) or "80GiB" (2^30).

    Raises:
        ConfigError: no number, no unit, or an unknown one.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", str(text))
    size = 0.0 if match is None else float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if not 0 < size < math.inf:
        raise ConfigError(f"gpu_memory={text!r}: a number above 0 with a unit, such as 80GB or 74.5GiB")
    return int(size)


def check_methods(methods: Any) -> tuple[str, ...]:
    """The methods as a tuple.

    Raises:
        ConfigError: none, or one that does not exist.
    """
    chosen = (methods,) if isinstance(methods, str) else tuple(methods)
    unknown = [method for method in chosen if method not in METHODS]
    if unknown or not chosen:
        raise ConfigError(f"method={', '.join(map(repr, unknown)) or 'none'}: some of {', '.join(METHODS)}")
    return chosen


def _require_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: an integer of at least 1")
