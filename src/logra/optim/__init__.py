"""Directions, momentum, rounding and the optimizer that turns sketches into updates of the weights."""

from logra.optim.config import Config
from logra.optim.sketch_optimizer import SketchOptimizer

__all__ = ["Config", "SketchOptimizer"]
