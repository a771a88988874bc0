"""Tables of memory: one row per category, one column per method, and which rows a method changes."""

from collections.abc import Mapping, Sequence
from typing import Any

from logra.memory.categories import CATEGORIES, CHANGED, SHAPE_CALCULATION

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SAME = 0.01
"""Methods whose bytes differ by less than this share of the largest peak have the same row."""


def readable(num_bytes: float) -> str:
    """Bytes with a unit that a person reads, three digits."""
    for size, unit in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def method_table(methods: Mapping[str, Mapping[str, Any]], *, markdown: bool = False) -> str:
    """Bytes at the peak by category and method.

    Args:
        methods: name -> {"peak_bytes", "peak_phase", "at_peak", "resident"}, or {"refused"}, which is a column without
            figures. At least one has figures.
        markdown: with pipes, as documents show it.

    Returns:
        One row per category that any method has, with its mark: "changed" or "constant" between the methods, or for a
        single method, against dense AdamW by design. Then the sums, the phase of the peak, and what is left between steps.
    """
    planned = [result for result in methods.values() if "refused" not in result]
    largest = max(result["peak_bytes"] for result in planned)
    values = {category: [int(result["at_peak"].get(category, 0)) for result in planned] for category in CATEGORIES}
    shown = [category for category in CATEGORIES if any(values[category])]
    heads = [
        "at the peak",
        *map(CATEGORIES.__getitem__, shown),
        "sum at the peak",
        "phase of the peak",
        "between steps",
    ]
    marks = ["", *(_mark(category, values[category], largest) for category in shown), "", "", ""]
    columns = (_column(name, result, shown) for name, result in methods.items())
    rows = [list(row) for row in zip(heads, *columns, marks, strict=True)]
    return _markdown(rows) if markdown else _aligned(rows)


def profile_text(method: str, report: Mapping[str, Any]) -> str:
    """What a run shows at its end: the table of its method, the peak of every phase, and the shape calculation."""
    phases = ", ".join(f"{name} {readable(peak['peak_bytes'])}" for name, peak in report["phases"].items())
    return f"{method_table({method: report})}\nPeak of each phase: {phases}\n{SHAPE_CALCULATION}"


def _column(name: str, result: Mapping[str, Any], categories: Sequence[str]) -> list[str]:
    if "refused" in result:
        return [f"{name} (refused)", *["-"] * (len(categories) + 3)]
    return [
        name,
        *(readable(result["at_peak"].get(category, 0)) for category in categories),
        readable(result["peak_bytes"]),
        str(result["peak_phase"]),
        readable(sum(result["resident"].values())),
    ]


def _mark(category: str, values: list[int], largest: int) -> str:
    if len(values) == 1:
        return "changed" if category in CHANGED else "constant"
    return "changed" if max(values) - min(values) > _SAME * largest else "constant"


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)),
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)
