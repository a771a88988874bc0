"""Low-rank sketches of weight gradients: which modules, how they are captured, how a gradient is recovered."""

from logra.sketch.capture import Capture, detach
from logra.sketch.targets import Target, find_targets

__all__ = ["Capture", "Target", "detach", "find_targets"]
