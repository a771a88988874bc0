"""What the baselines of `logra train` can be told: dense AdamW, LoRA, GaLore and APOLLO."""

from dataclasses import dataclass

from logra.rl.checks import require_integer, require_number


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Dense AdamW on all weights (method adamw)."""

    lr: float = 3e-5
    """Learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""

    def __post_init__(self) -> None:
        require_number("adamw.lr", self.lr, above=0)
        require_number("adamw.weight_decay", self.weight_decay)
        require_number("adamw.max_grad_norm", self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on all linear layers, trained with AdamW and merged at the end (method lora)."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Scale of the adapters: they are multiplied by alpha / rank."""
    lr: float = 3e-4
    """Learning rate of AdamW."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""

    def __post_init__(self) -> None:
        require_integer("lora.rank", self.rank, 1)
        require_number("lora.alpha", self.alpha, above=0)
        require_number("lora.lr", self.lr, above=0)
        require_number("lora.max_grad_norm", self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class GaLoreConfig:
    """AdamW in subspaces of the dense gradient, from the package galore-torch (method galore; Zhao et al., arXiv 2403.03507).

    All linear layers but the head are projected; embeddings, head and norms get dense AdamW, as the package does it.
    """

    rank: int = 64
    """Rank of the subspaces."""
    lr: float = 3e-4
    """Learning rate."""
    scale: float = 0.25
    """Factor of the projected update."""
    update_proj_gap: int = 200
    """Steps between two SVDs that choose the subspaces anew."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""

    def __post_init__(self) -> None:
        require_integer("galore.rank", self.rank, 1)
        require_number("galore.lr", self.lr, above=0)
        require_number("galore.scale", self.scale, above=0)
        require_integer("galore.update_proj_gap", self.update_proj_gap, 1, "steps")
        require_number("galore.max_grad_norm", self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class ApolloConfig:
    """Channel-wise scaled SGD with second moments in a random subspace, from the package apollo-torch (method apollo,
    arXiv 2412.05270).

    All linear layers but the head are projected; embeddings, head and norms get dense AdamW, as the package does it.
    """

    rank: int = 64
    """Rank of the random subspaces."""
    lr: float = 1e-4
    """Learning rate."""
    scale: float = 1.0
    """Factor of the scaled update."""
    update_proj_gap: int = 200
    """Steps between two draws of the subspaces."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""

    def __post_init__(self) -> None:
        require_integer("apollo.rank", self.rank, 1)
        require_number("apollo.lr", self.lr, above=0)
        require_number("apollo.scale", self.scale, above=0)
        require_integer("apollo.update_proj_gap", self.update_proj_gap, 1, "steps")
        require_number("apollo.max_grad_norm", self.max_grad_norm)
