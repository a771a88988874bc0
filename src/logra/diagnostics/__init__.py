"""Measurements that a run can do without: which way a step goes, and what it disturbs. They never change the training."""

from logra.diagnostics.collateral import CollateralProbe, unrelated_texts
from logra.diagnostics.config import DiagnosticsConfig
from logra.diagnostics.direction import DirectionProbe, DirectionReport
from logra.diagnostics.weight_space import LayerReport

__all__ = [
    "CollateralProbe",
    "DiagnosticsConfig",
    "DirectionProbe",
    "DirectionReport",
    "LayerReport",
    "unrelated_texts",
]
