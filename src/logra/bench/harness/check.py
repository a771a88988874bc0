"""Regressions: ratios of a fresh quick run against baselines that were kept.

Ratios, not seconds: two things timed in one process, interleaved, slow down together on a busy machine. A baseline file
is `{"NAME": {"value": 1.52, "better": "higher"}, ...}`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from logra.errors import ConfigError

ALLOWED_LOSS = 0.10
"""Share of a ratio that may be lost before the check fails."""


@dataclass(frozen=True)
class Ratio:
    """A number that should stay as good as it is on any machine."""

    value: float
    better: Literal["higher", "lower"]

    def loss_from(self, baseline: "Ratio") -> float:
        """Share by which this is worse than the baseline; negative where it is better."""
        change = self.value / baseline.value - 1.0
        return -change if baseline.better == "higher" else change


def best_of(first: Mapping[str, Ratio], second: Mapping[str, Ratio]) -> dict[str, Ratio]:
    """The better of each ratio over two runs: what a disturbed run has lost, a second one does not lose again."""
    assert first.keys() == second.keys()
    return {name: min(first[name], second[name], key=lambda ratio: ratio.loss_from(first[name])) for name in first}


def losses(ratios: Mapping[str, Ratio], baselines: Mapping[str, Ratio]) -> list[str]:
    """What was lost, a line each; empty if nothing."""
    found = []
    for name, baseline in baselines.items():
        if name not in ratios:
            found.append(f"{name}: was not measured; the baseline is {baseline.value:.3f}")
        elif not (loss := ratios[name].loss_from(baseline)) <= ALLOWED_LOSS:  # nor is NaN
            found.append(
                f"{name}: {ratios[name].value:.3f}, the baseline is {baseline.value:.3f} ({baseline.better} is better): "
                f"{loss:.0%} lost"
            )
    return found


def read_baselines(path: Path) -> dict[str, Ratio]:
    """Read a baseline file.

    Raises:
        ConfigError: there is none, it is not one, or a ratio of it is none that another can be compared with.
    """
    try:
        ratios = {name: Ratio(**ratio) for name, ratio in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no baseline yet; make one with --save-baseline") from error
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not a baseline file: {error}") from error
    for name, ratio in ratios.items():
        number = isinstance(ratio.value, int | float) and not isinstance(ratio.value, bool)
        if not (number and math.isfinite(ratio.value) and ratio.value > 0):
            raise ConfigError(
                f"{path}: {name!r}: value={ratio.value!r}: a finite number above 0; --save-baseline makes it anew"
            )
        if ratio.better not in ("higher", "lower"):
            raise ConfigError(f"{path}: {name!r}: better={ratio.better!r}: higher or lower")
    return ratios


def write_baselines(path: Path, ratios: Mapping[str, Ratio]) -> None:
    """Write a baseline file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {name: dataclasses.asdict(dataclasses.replace(r, value=round(r.value, 3))) for name, r in ratios.items()}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
