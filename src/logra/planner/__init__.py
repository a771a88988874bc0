"""The memory of a training that is not at hand: the real step, traced over fake tensors."""

from logra.planner.plan import plan

__all__ = ["plan"]
