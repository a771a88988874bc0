"""Reinforcement learning of the full weights of language models from low-rank gradient sketches.

`SketchOptimizer` is the entry point; `logra.rl.GRPOTrainer` the drop-in for TRL's. Importing `logra` needs torch alone.
"""

from logra.errors import LograError
from logra.optim import Config, SketchOptimizer

from logra.trust import TrustRegion
from logra.update import LowRankUpdate, PolicyUpdate

__version__ = "0.1.0"

__all__ = ["Config", "LograError", "LowRankUpdate", "PolicyUpdate", "SketchOptimizer", "TrustRegion", "__version__"]
