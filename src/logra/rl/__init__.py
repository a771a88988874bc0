"""Reinforcement learning with TRL: the trainer, the tasks of the command line, and their configuration."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logra.rl.trainer import GRPOTrainer

__all__ = ["GRPOTrainer"]


def __getattr__(name: str) -> Any:
    # TRL takes seconds to import, and the configuration of the command line does not need it.
    if name == "GRPOTrainer":
        from logra.rl.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
