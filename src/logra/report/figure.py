"""SVG drawings with matplotlib whose colours are variables of the page's style sheet, so that light and dark both read.

matplotlib draws with placeholder colours, one for each variable; the text of the SVG then names the variable instead.
Text stays text, in the font of the page. No pyplot: nothing global is touched.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logra.report.series import Band

NUM_COLOURS = 8
"""Colours of groups and of categories; the ninth group takes the first again, with another marker."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
"""Of groups: colour is never the only thing that tells two apart."""
DASHES = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.6))}
WIDTH_IN, HEIGHT_IN = 4.3, 2.45
NUM_MARKERS = 6
MAX_LABEL = 28
"""Characters of a bar's label that a figure of the usual width has room for."""
FONT_PT = 9

INK, MUTED, GRID, PAPER = "#010203", "#010204", "#010205", "#010206"
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    f"#0102{0x10 + index:02x}": f"--c{index}" for index in range(NUM_COLOURS)
}


@dataclass(frozen=True)
class Drawn:
    """A band with its looks."""

    band: Band
    index: int
    """Of the group: its colour and marker."""
    style: str
    """Key of `DASHES`."""


def colour(index: int) -> str:
    """The placeholder of a group's or a category's colour."""
    return f"#0102{0x10 + index % NUM_COLOURS:02x}"


def line_chart(drawn: Sequence[Drawn], *, unit: str, legend: Sequence[tuple[str, str]], log: bool, title: str) -> str:
    """Curves over optimizer steps.

    Args:
        drawn: bands; a band of one run has no width.
        unit: label of the vertical axis.
        legend: (label, style) of the quantities, empty for one quantity.
        log: logarithmic vertical axis, if all values are above zero and far enough apart.
        title: what a screen reader says.
    """
    from matplotlib.lines import Line2D

    figure, axes = _figure()
    for one in drawn:
        _draw(axes, one)
    lowest, highest = min(min(one.band.low) for one in drawn), max(max(one.band.high) for one in drawn)
    if log and _spans_decades(lowest, highest):
        axes.set_yscale("log")
    elif lowest == highest:  # around a constant, the automatic limits make noise of rounding
        axes.set_ylim(*((0, 2 * lowest) if lowest > 0 else (lowest - 1, lowest + 1) if lowest < 0 else (0, 1)))
    _label(axes, "optimizer step", unit)
    if legend:
        handles = [
            Line2D([], [], color=INK, linestyle=DASHES[style], linewidth=1.4, label=text) for text, style in legend
        ]
        figure.legend(handles=handles, ncols=len(legend), loc="outside upper left", **_legend_looks())
    return _svg(figure, title)


def scatter_chart(
    points: Sequence[tuple[list[float], list[float], int]], *, labels: tuple[str, str], title: str
) -> str:
    """Points against the diagonal where both agree; logarithmic axes where the values are far enough apart.

    Args:
        points: (x, y, index of the group), all above zero.
        labels: of the horizontal and the vertical axis.
        title: what a screen reader says.
    """
    figure, axes = _figure()
    values = [value for x, y, _ in points for value in (*x, *y)]
    is_log = _spans_decades(min(values), max(values))
    ends = [min(values) / 1.5, max(values) * 1.5] if is_log else [0.0, max(values) * 1.05]
    axes.plot(ends, ends, color=MUTED, linewidth=1.0, linestyle=DASHES["dashed"])
    for x, y, index in points:
        marker = MARKERS[index % len(MARKERS)]
        axes.scatter(x, y, s=13, color=colour(index), marker=marker, linewidths=0.4, edgecolors=PAPER, zorder=3)
    if is_log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.xaxis.set_major_locator(_ticks(integer=False))
    _label(axes, *labels)
    return _svg(figure, title)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[float]]], *, num_categories: int, unit: str, title: str, num_named: int
) -> str:
    """Horizontal bars, stacked; the page says which colour is which category.

    Args:
        rows: (label, a value for each category), from top to bottom.
        num_categories: values of each row.
        unit: label of the horizontal axis.
        title: what a screen reader says.
        num_named: categories with a colour of their own; any further one is grey.
    """
    longest = max(len(label) for label, _ in rows)
    # As wide as the curves, so that a phone shows the text in the same size, unless labels would crowd out the bars.
    width = WIDTH_IN + min(max(0.065 * (longest - MAX_LABEL), 0.0), 1.2)
    figure, axes = _figure(height=0.75 + 0.26 * len(rows), width=width)
    starts = [0.0] * len(rows)
    for category in range(num_categories):
        values = [row[category] for _, row in rows]
        looks = {"color": colour(category) if category < num_named else MUTED, "edgecolor": PAPER, "linewidth": 0.8}
        axes.barh(range(len(rows)), values, left=starts, height=0.72, **looks)
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    axes.xaxis.set_major_locator(_ticks(integer=False))
    axes.set_yticks(range(len(rows)), [label.replace("$", r"\$") for label, _ in rows])  # not a formula
    axes.invert_yaxis()
    _label(axes, unit, "")
    axes.grid(visible=False, axis="y")
    return _svg(figure, title)


def _draw(axes: Any, one: Drawn) -> None:
    band, looks = one.band, colour(one.index)
    if any(low < high for low, high in zip(band.low, band.high, strict=True)):
        axes.fill_between(band.steps, band.low, band.high, color=looks, alpha=0.2, linewidth=0)
    axes.plot(
        band.steps,
        band.mean,
        color=looks,
        linestyle=DASHES[one.style],
        linewidth=1.5,
        marker=MARKERS[one.index % len(MARKERS)] if one.style == "solid" else "",
        markersize=3.6,
        markeredgecolor=PAPER,
        markeredgewidth=0.5,
        markevery=max(1, len(band.steps) // NUM_MARKERS),
    )


def _spans_decades(lowest: float, highest: float) -> bool:
    """Whether a logarithmic axis has ticks enough to be read."""
    return lowest > 0 and highest >= 20 * lowest


def _ticks(*, integer: bool) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=6, integer=integer)


def _figure(height: float = HEIGHT_IN, width: float = WIDTH_IN) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.xaxis.set_major_locator(_ticks(integer=True))
    axes.grid(visible=True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=FONT_PT, length=2.5, width=0.6, which="both")
    for side, spine in axes.spines.items():
        spine.set(color=MUTED, linewidth=0.6, visible=side in ("left", "bottom"))
    for part in (figure, axes):
        part.patch.set_visible(False)
    return figure, axes


def _label(axes: Any, horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal, color=MUTED, fontsize=FONT_PT)
    axes.set_ylabel(vertical, color=MUTED, fontsize=FONT_PT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set(color=MUTED, fontsize=FONT_PT)


def _legend_looks() -> dict[str, Any]:
    return {"frameon": False, "fontsize": FONT_PT, "labelcolor": INK, "handlelength": 2.2, "borderpad": 0.6}


def _svg(figure: Any, title: str) -> str:
    """The drawing as inline SVG."""
    import matplotlib

    buffer = io.StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": FONT_PT, "axes.unicode_minus": True}
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return themed(buffer.getvalue(), title)


def themed(svg: str, title: str) -> str:
    """Inline SVG from matplotlib's: variables for colours, the page's font, no ids but those that are referred to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\s(width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", svg)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{_attribute(title)}"', 1).strip()


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
