"""Parts of the figures of benchmarks."""

import io
import statistics
from collections.abc import Sequence
from typing import Any


def plot_runs(axes: Any, x: Sequence[float], runs: Sequence[Sequence[float]], *, colour: str, **style: Any) -> None:
    """Draw the mean over runs, and their range as a band.

    Args:
        axes: of matplotlib.
        x: positions [points].
        runs: values [runs][points].
        colour: of line and band.
        style: of the line.
    """
    by_point = list(zip(*runs, strict=True))
    axes.plot(x, [statistics.fmean(values) for values in by_point], color=colour, **style)
    axes.fill_between(x, list(map(min, by_point)), list(map(max, by_point)), color=colour, alpha=0.15, linewidth=0)


def svg(figure: Any) -> str:
    """A figure of matplotlib as SVG, the same text each time: without a date, and without random names."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "logra"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
