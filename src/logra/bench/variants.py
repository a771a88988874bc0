"""Other settings of the methods on the default run: learning rates, ranks, and every method at equal KL per step.

A cell is one whole run, as in `logra bench learning`.
"""

from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Results, require_known
from logra.bench.lab import training
from logra.bench.learning import BUDGET, SCHEDULE, UNSCALED

KL = (*BUDGET, "--trust.alpha-max", "1e6")
"""The KL per step of the baselines at equal KL and of `paper`; a learning rate only sets the length that is then scaled."""
FIRST = ("--trust.kl-budget", "0.3", "--trust.kl-budget-final", "0.1", "--trust.schedule-steps", "5")
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logra-m8": (
        "`logra`, inputs not scaled, momentum 0.8",
        ("--method", "logra", "--logra.momentum", "0.8", *UNSCALED),
    ),
    "logra-first": (
        "`logra`, budget 0.3 falling to 0.1 over 5 steps",
        ("--method", "logra", *FIRST),
    ),
    "logra-0.3": ("`logra`, budget 0.3", ("--method", "logra", "--trust.kl-budget", "0.3")),
    "logra-kl": ("`logra`, equal KL", ("--method", "logra", *SCHEDULE)),
    "adamw-1e-5": ("dense AdamW, lr 1e-5", ("--method", "adamw", "--adamw.lr", "1e-5")),
    "adamw-1e-4": ("dense AdamW, lr 1e-4", ("--method", "adamw", "--adamw.lr", "1e-4")),
    "lora-r4": ("LoRA, rank 4, alpha 8, lr 3e-4", ("--method", "lora", "--lora.rank", "4", "--lora.alpha", "8")),
    "lora-r64": ("LoRA, rank 64, alpha 128, lr 3e-4", ("--method", "lora", "--lora.rank", "64", "--lora.alpha", "128")),
    "lora-1e-3": ("LoRA, rank 16, lr 1e-3", ("--method", "lora", "--lora.lr", "1e-3")),
    "galore-r24": ("GaLore, rank 24, lr 3e-4", ("--method", "galore", "--galore.rank", "24")),
    "apollo-r24": ("APOLLO, rank 24, lr 1e-4", ("--method", "apollo", "--apollo.rank", "24")),
    "paper-r80": ("`paper`, rank 80, equal KL", ("--method", "paper", *KL, "--logra.rank", "80")),
    "paper-r320": ("`paper`, rank 320, equal KL", ("--method", "paper", *KL, "--logra.rank", "320")),
    "adamw-kl": ("dense AdamW, equal KL", ("--method", "adamw", "--use-trust", "true", *KL)),
    "lora-kl": ("LoRA, rank 16, equal KL", ("--method", "lora", "--use-trust", "true", *KL)),
    "galore-kl": ("GaLore, rank 64, equal KL", ("--method", "galore", "--use-trust", "true", *KL)),
    "apollo-kl": ("APOLLO, rank 64, equal KL", ("--method", "apollo", "--use-trust", "true", *KL)),
}
"""Name of an arm: its title in tables, and its flags. Sketches of `paper` at rank 80 are as large as sketches and momentum of
`logra` at rank 16 on a square weight, 80 out = 16 (out + 2 in) + 16 (out + in); at rank 320 four times as large. Moments and
projectors of GaLore and APOLLO, r (2 max(out, in) + min(out, in)), are so at rank 24, over the layers of SmolLM2."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Settings; those of GaLore and APOLLO need their packages (`make baselines`)."""

    def __post_init__(self) -> None:
        require_known("arms", self.arms, ARMS)


def cells(options: Options) -> list[Cell]:
    """Every setting with one seed before the next seed."""
    return [{"arm": arm, "seed": seed} for seed in options.seeds for arm in options.arms]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Train, and keep the results and the curves."""
    return training.run(ARMS[cell["arm"]][1], seed=cell["seed"])


def table(results: Results) -> str:
    """Results over seeds, and the learning curves."""
    return training.table(results, ARMS)
