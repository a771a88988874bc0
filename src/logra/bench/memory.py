"""Memory of whole processes of `logra train`, by method: peak resident memory, and live tensor bytes by category.

A cell is one method in a process of its own, either as it is (peak of the process) or with --profile (bytes by category,
which slows the process down and makes it larger: the two are not to be read off one run).
"""

import json
from dataclasses import dataclass
from typing import Any

from logra.bench.harness import Cell, Ratio, Results, markdown_table, require_known, require_positive
from logra.bench.lab.training import trained
from logra.memory.table import method_table, readable
from logra.planner.options import METHODS

KINDS = ("process", "profile")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    methods: tuple[str, ...] = METHODS
    """Methods."""
    kinds: tuple[str, ...] = KINDS
    """process (peak resident memory), profile (live tensor bytes by category)."""
    model: str = "smollm2-135m-instruct"
    """Model to train."""
    num_steps: int = 2
    """Steps of a run: the second is the first with an optimizer state."""

    def __post_init__(self) -> None:
        require_known("methods", self.methods, METHODS)
        require_known("kinds", self.kinds, KINDS)
        require_positive(self, "num_steps")


CHECK = Options(methods=("logra", "adamw", "lora"), kinds=("process",), num_steps=1)
"""The processes whose peaks `make bench-check` compares. One step: moments are made in it, beside the gradients."""


def cells(options: Options) -> list[Cell]:
    """Every method as it is, then with a profile."""
    return [{"kind": kind, "method": method} for kind in options.kinds for method in options.methods]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Train, and keep memory.json."""
    flags = ["--method", cell["method"], "--model", options.model, "--run.num-steps", str(options.num_steps),
             "--num-heldout", "0", "--profile", str(cell["kind"] == "profile").lower()]  # fmt: skip
    with trained(*flags) as run:
        return json.loads((run / "memory.json").read_text())


def table(results: Results) -> str:
    """Peak of the processes, and the profiles side by side."""
    processes = [(method, *results.select(kind="process", method=method)) for method in METHODS]
    found = [(method, runs[0]) for method, *runs in processes if runs]
    parts = []
    if found:
        largest = max(run["process_peak_bytes"] for _, run in found)
        rows = [
            [method, readable(run["process_peak_bytes"]), f"{run['process_peak_bytes'] / largest:.2f}"]
            for method, run in found
        ]
        parts.append(markdown_table(["method", "peak resident memory", "of the largest"], rows))
    profiles = {method: run for method in METHODS for run in results.select(kind="profile", method=method)}
    if profiles:
        parts.append(method_table(profiles, markdown=True))
    return "\n\n".join(parts)


def ratios(results: Results) -> dict[str, Ratio]:
    """Peak resident memory of the process of `logra`, as a share of that of every other method."""
    (own,) = results.select(kind="process", method="logra")
    return {
        f"logra against {method}, peak resident memory": Ratio(
            own["process_peak_bytes"] / other["process_peak_bytes"], "lower"
        )
        for method in METHODS
        if method != "logra"
        for other in results.select(kind="process", method=method)
    }
