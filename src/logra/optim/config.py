"""The settings of `SketchOptimizer`, checked before a model is touched."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from logra.contracts import TrustPolicy
from logra.errors import ConfigError
from logra.update import MAX_RANK

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the sketch, the direction and the update."""

    lr: float = 3e-4
    """Relative step: ‖ΔW‖_F / ‖W‖_F over all targets, before a trust region scales it."""
    rank: int = 16
    """r, rank of the sketches, the momentum and the update."""
    sketch: Literal["one_sided", "two_sided"] = "two_sided"
    """Keep S = G Aᵀ alone, or S and T = B G and recover the gradient from both."""
    side: Literal["in", "out", "auto"] = "in"
    """one_sided: keep G Aᵀ ("in"), B G ("out"), or the smaller of the two ("auto")."""
    input_scaling: bool = True
    """Damp input features by their root second moment (EMA over updates, rounded to powers of two): text that has nothing to
    do with the task is disturbed several times less."""
    direction: Literal["row_adam", "spectral", "factored"] = "spectral"
    """What is made of the gradient: see logra.optim.direction. "factored" needs two_sided."""
    restore_norm: bool = False
    """one_sided row_adam: rescale each layer's direction to the norm of its sketch (the paper does)."""
    momentum: float = 0.9
    """β of the momentum, 0 turns it off. one_sided needs refresh_every >= 2 for it."""
    coherence_scaling: bool = False
    """Shorten each step, and the KL it is allowed, by how far successive gradients agree (`logra.optim.coherence`). Needs
    two_sided and momentum."""
    refresh_every: int = 1
    """Updates between two draws of the projections."""
    target_modules: str | Sequence[str] = DEFAULT_TARGETS
    """Name patterns of the sketched modules, or "all-linear"."""
    non_target: Literal["freeze", "adamw"] = "freeze"
    """What happens to all other parameters: frozen, or trained by an inner torch.optim.AdamW."""
    non_target_lr: float = 1e-5
    """Learning rate of the inner AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay per unit of lr: W <- W (1 - lr α weight_decay) before the subtraction."""
    max_grad_norm: float | None = None
    """Clip the norm of the recovered gradient before it enters the moments; None does not."""
    trust: TrustPolicy | None = None
    """A logra.TrustRegion that scales each step to a KL budget; None takes every step in full."""
    weight_storage: Literal["fp32", "split32", "split24"] = "fp32"
    """fp32 parameters, or bf16 parameters with 16 more bits that the optimizer keeps (together fp32), or with 8 more bits,
    to which every update is rounded at random without bias."""
    factor_bits: Literal[4, 8] = 4
    """Bits of the integer factors of an update."""
    seed: int = 0
    """Seed of the projections and of the rounding."""

    def __post_init__(self) -> None:
        _require_positive("lr", self.lr)
        _require_positive("non_target_lr", self.non_target_lr)
        if not isinstance(self.rank, int) or not 1 <= self.rank <= MAX_RANK:
            raise ConfigError(f"rank={self.rank!r}: must be an integer from 1 to {MAX_RANK}")
        for name in ("sketch", "side", "direction", "non_target", "weight_storage", "factor_bits"):
            _require_choice(self, name)
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum!r}: must be at least 0 and below 1")
        if not isinstance(self.refresh_every, int) or self.refresh_every < 1:
            raise ConfigError(f"refresh_every={self.refresh_every!r}: must be an integer of at least 1 (updates)")
        longest = self.lr * getattr(self.trust, "alpha_max", 1.0)
        if not (_is_number(self.weight_decay) and 0 <= self.weight_decay * longest < 1):
            raise ConfigError(
                f"weight_decay={self.weight_decay!r}: must be at least 0, and below 1 / (lr alpha_max) = {1 / longest:g}"
            )
        if self.trust is not None and not all(
            hasattr(self.trust, name) for name in ("make_probe", "predict", "verify", "snapshot", "merged_kl")
        ):
            raise ConfigError(f"trust={self.trust!r}: must be a logra.TrustRegion or None")
        patterns = (self.target_modules,) if isinstance(self.target_modules, str) else self.target_modules
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(f"target_modules={self.target_modules!r}: must be a name pattern or a list of them")
        if self.max_grad_norm is not None:
            _require_positive("max_grad_norm", self.max_grad_norm)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed!r}: must be an integer from 0 to 2**63 - 1")
        self._check_combinations()

    def _check_combinations(self) -> None:
        one_sided = self.sketch == "one_sided"
        if self.direction == "factored" and one_sided:
            raise ConfigError("direction='factored' needs the columns of the gradient: use sketch='two_sided'")
        if self.side != "in" and not one_sided:
            raise ConfigError(f"side={self.side!r} with sketch='two_sided', which keeps both sides: leave side at 'in'")
        if self.restore_norm and not (one_sided and self.direction == "row_adam"):
            raise ConfigError("restore_norm=True belongs to sketch='one_sided' with direction='row_adam'")
        if self.momentum > 0 and one_sided and self.refresh_every == 1:
            raise ConfigError(
                f"momentum={self.momentum!r} with sketch='one_sided' and refresh_every=1: the average of sketches needs "
                f"projections that are held. Set refresh_every (20, say) or momentum=0."
            )
        if self.coherence_scaling and (one_sided or self.momentum == 0):
            raise ConfigError(
                f"coherence_scaling=True compares the momentum with the gradients: it needs sketch='two_sided' (here "
                f"{self.sketch!r}) and momentum above 0 (here {self.momentum!r}). Set these, or coherence_scaling=False"
            )

    @classmethod
    def paper(cls, **overrides: Any) -> "Config":
        """The settings of LoGRA (arXiv 2610.06647); keyword arguments override single ones."""
        settings: dict[str, Any] = {
            "sketch": "one_sided",
            "side": "in",
            "input_scaling": False,
            "direction": "row_adam",
            "restore_norm": True,
            "momentum": 0.0,
            "refresh_every": 1,
            "rank": 256,
            "lr": 6e-5,
        }
        return cls(**(settings | overrides))

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "Config":
        """A config from keyword arguments, with an error that lists the names when one is unknown."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(f"{name!r} is not a setting of SketchOptimizer. Allowed: {', '.join(known)}")
        return cls(**settings)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require_positive(name: str, value: float) -> None:
    if not (_is_number(value) and value > 0):
        raise ConfigError(f"{name}={value!r}: must be a finite number above 0")


def _require_choice(config: Config, name: str) -> None:
    allowed = Config.__annotations__[name].__args__
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
