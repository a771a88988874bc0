"""Reinforcement learning of the full weights of language models from low-rank gradient sketches.

`SketchOptimizer` is the entry point; `logra.rl.GRPOTrainer` the drop-in for TRL's. Importing `logra` needs none of
the RL libraries.
"""

from logra import checkpoint, diagnostics, memory, sync
from logra.errors import LograError
from logra.optim import Config, SketchOptimizer
from logra.planner import plan
from logra.sketch import detach
from logra.trust import TrustRegion
from logra.update import LowRankUpdate, PolicyUpdate

__version__ = "0.1.0"

memory.plan = plan  # type: ignore[attr-defined]  # the planner lies above the ledger and needs the optimizer

__all__ = [
    "Config",
    "LograError",
    "LowRankUpdate",
    "PolicyUpdate",
    "SketchOptimizer",
    "TrustRegion",
    "__version__",
    "checkpoint",
    "detach",
    "diagnostics",
    "memory",
    "sync",
]
