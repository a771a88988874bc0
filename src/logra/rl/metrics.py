"""What a training step reports, under which names, and how it is measured.

Units: `time/*_s` seconds, `memory/peak_bytes` and `sync/bytes` bytes, KL and entropy nats per generated token.
"""

import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logra.phases import phase

DIAGNOSTIC_NAMES = {
    "predicted_kl": "trust/predicted_kl",
    "realised_kl": "trust/realised_kl",
    "merged_kl": "trust/merged_kl",
    "num_shrinks": "trust/num_shrinks",
    "alpha": "trust/alpha",
    "kl_budget": "trust/budget",
    "grad_norm": "optim/grad_norm",
    "update_ratio": "optim/update_ratio",
    "coherence": "optim/coherence",
}
"""Keys of `SketchOptimizer.diagnostics()` and the metrics they are logged as."""


ROLLOUT_VERSION = "sync/rollout_version"
"""Metric that says which policy version sampled the completions of a step."""


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: by torch's allocator on CUDA, by the whole process (resident set) elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # whose ru_maxrss begins at what the process that started this one held
        if found := re.search(rb"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_bytes()):
            return int(found[1]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def optimizer_metrics(diagnostics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in an optimizer's diagnostics; what is absent is left out.

    `trust/predicted_kl` is the KL of the proposal before it is scaled, `trust/planned_kl` that of the step as taken:
    the one to compare with `trust/realised_kl`. `trust/realised_over_planned` is the ratio of the two.
    """
    metrics = {
        name: float(diagnostics[key]) for key, name in DIAGNOSTIC_NAMES.items() if diagnostics.get(key) is not None
    }
    # What observers measured (`logra.diagnostics`) has the names of metrics already.
    metrics |= {name: value for name, value in diagnostics.items() if "/" in name}
    if "trust/alpha" in metrics and "trust/predicted_kl" in metrics:
        # The prediction is that of the whole proposal; the KL is quadratic in the share of it that was taken.
        metrics["trust/planned_kl"] = planned = metrics["trust/alpha"] ** 2 * metrics["trust/predicted_kl"]
        if planned > 0 and "trust/realised_kl" in metrics:
            metrics["trust/realised_over_planned"] = metrics["trust/realised_kl"] / planned
    return metrics


def reward_metrics(totals: Tensor, signal_free: Tensor, num_generations: int) -> dict[str, float]:
    """Mean and spread of the rewards of one generation batch.

    Args:
        totals: fp32 [completions], weighted sum over the reward functions, NaN where not scored.
        signal_free: bool [completions], see `rewards.signal_free_rows`.
        num_generations: completions per group.
    """
    scored = totals[~totals.isnan()]
    nan = float("nan")
    return {
        "reward/mean": scored.mean().item() if scored.numel() else nan,
        "reward/std": scored.std(correction=0).item() if scored.numel() else nan,
        "reward/frac_zero_std": signal_free.view(-1, num_generations)[:, 0].float().mean().item(),
    }


class StepClock:
    """Splits the wall-clock time of a step into rollout (generation and rewards) and update (all the rest)."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._rollout_s = 0.0

    def start_step(self) -> None:
        """Forget what the last step took."""
        self._start = time.perf_counter()
        self._rollout_s = 0.0

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Count the time inside as rollout."""
        start = time.perf_counter()
        try:
            with phase("rollout"):
                yield
        finally:
            self._rollout_s += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Seconds since `start_step`, split in two."""
        return {
            "time/rollout_s": self._rollout_s,
            "time/update_s": time.perf_counter() - self._start - self._rollout_s,
        }
