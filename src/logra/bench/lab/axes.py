"""What the comparisons of the lab train: settings by name, and the axes along which `logra bench settings` lays them out."""

from collections.abc import Mapping
from typing import Any

import torch

from logra.bench.lab.arms import Arm, DenseSpectral

DEFAULT = "spectral-16-m"
"""The arm that the others are compared with: the defaults of `logra.Config` but for input scaling, spelled out so that cells
keep their meaning when a default changes."""


def _two_sided(constants: Mapping[str, Any] | None = None, **settings: Any) -> Arm:
    defaults = {"sketch": "two_sided", "direction": "spectral", "rank": 16, "momentum": 0.9, "factor_bits": 4,
                "input_scaling": False}  # fmt: skip
    return Arm(defaults | settings, constants=constants or {})


def _one_sided(direction: str, rank: int, **settings: Any) -> Arm:
    one_sided = {"sketch": "one_sided", "direction": direction, "rank": rank, "momentum": 0.0, "input_scaling": False}
    return Arm(one_sided | settings)


def _row_adam(rank: int, *, scaled: bool) -> Arm:
    """Inputs scaled, or the paper's norm restoration."""
    return _one_sided("row_adam", rank, input_scaling=scaled, restore_norm=not scaled)


def _scaled(**constants: Any) -> Arm:
    """The default with input scaling, whose constants are varied."""
    return _two_sided(
        {f"logra.optim.input_scaling.{name}": value for name, value in constants.items()}, input_scaling=True
    )


def _sketch_rows(multiple: float) -> Arm:
    """The default with l = `multiple` r rows of B."""
    return _two_sided({"logra.sketch.accumulate.SketchSpec.rank_out": property(lambda spec: int(multiple * spec.rank))})


ARMS: dict[str, Arm] = {
    "dense-sgd-m": Arm(dense=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "dense-adamw": Arm(dense=lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0)),
    "dense-spectral-m": Arm(dense=lambda p: DenseSpectral(p, 0.9)),
    "row-adam-32": _row_adam(32, scaled=False),
    "row-adam-64": _row_adam(64, scaled=False),
    "row-adam-scaled-32": _row_adam(32, scaled=True),
    "row-adam-scaled-64": _row_adam(64, scaled=True),
    "spectral-16": _two_sided(momentum=0.0),
    "spectral-16-m8": _two_sided(momentum=0.8),
    "spectral-16-m": _two_sided(),
    "spectral-16-m95": _two_sided(momentum=0.95),
    "spectral-8-m": _two_sided(rank=8),
    "spectral-32-m": _two_sided(rank=32),
    "spectral-32": _two_sided(rank=32, momentum=0.0),
    "factored-16-m": _two_sided(direction="factored"),
    "row-adam-16-m": _two_sided(direction="row_adam"),
    "refresh-5": _two_sided(refresh_every=5),
    "refresh-20": _two_sided(refresh_every=20),
    "bits-8": _two_sided(factor_bits=8),
    "l-1.5": _sketch_rows(1.5),
    "l-3": _sketch_rows(3.0),
    "scaled": _scaled(),
    "scaled-clamp-2": _scaled(MAX_EXPONENT=2),
    "scaled-ema-0.8": _scaled(DECAY=0.8),
    "scaled-quarter": _scaled(POWER=-0.25),
    "one-sided-in": _one_sided("spectral", 16),
    **{
        f"one-sided-{side}-held": _one_sided("spectral", 16, side=side, momentum=0.9, refresh_every=20)
        for side in ("in", "out", "auto")
    },
}
"""By the names that cells carry."""

AXES: dict[str, dict[str, str]] = {
    "direction": {
        "dense gradient, momentum 0.9": "dense-sgd-m",
        "dense AdamW": "dense-adamw",
        "dense spectral, momentum 0.9": "dense-spectral-m",
        "one-sided row_adam, r = 32 (the paper's, restored norms)": "row-adam-32",
        "one-sided row_adam, r = 32, input scaling": "row-adam-scaled-32",
        "two-sided row_adam": "row-adam-16-m",
        "two-sided factored": "factored-16-m",
        "two-sided spectral, no momentum": "spectral-16",
        "two-sided spectral (default)": "spectral-16-m",
    },
    "momentum": {
        "none": "spectral-16",
        "0.8": "spectral-16-m8",
        "0.9 (default)": "spectral-16-m",
        "0.95": "spectral-16-m95",
        "0.9, dense buffer and gradient": "dense-spectral-m",
    },
    "rank": {"8": "spectral-8-m", "16 (default)": "spectral-16-m", "32": "spectral-32-m"},
    "rows of B": {"l = 1.5 r": "l-1.5", "l = 2 r (default)": "spectral-16-m", "l = 3 r": "l-3"},
    "projections held for": {
        "1 update (default)": "spectral-16-m",
        "5 updates": "refresh-5",
        "20 updates": "refresh-20",
    },
    "sides": {
        "two-sided (default)": "spectral-16-m",
        "two-sided, no momentum": "spectral-16",
        "one-sided, in, no momentum": "one-sided-in",
        **{f"one-sided, {side}, held for 20": f"one-sided-{side}-held" for side in ("in", "out", "auto")},
    },
    "input scaling": {
        "none (as in the other tables)": "spectral-16-m",
        "c^(-1/2), within 2^±4, EMA 0.95": "scaled",
        "within 2^±2": "scaled-clamp-2",
        "EMA 0.8": "scaled-ema-0.8",
        "c^(-1/4)": "scaled-quarter",
    },
    "bits of the factors": {"4 (default)": "spectral-16-m", "8": "bits-8", "one factor of signs": "one-sided-in-held"},
}
"""Axis -> value on it -> name of its arm."""
