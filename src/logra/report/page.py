"""The HTML file: headings, figures, tables and a style sheet, with nothing that is fetched from elsewhere."""

import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from logra.errors import ConfigError
from logra.report import figure, tables
from logra.report.groups import Group, group_runs
from logra.report.memory import Stacks, memory_stacks, time_stacks
from logra.report.panels import SECTIONS, Panel
from logra.report.run import load
from logra.report.series import metric

MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", "<": "◀", ">": "▶"}
"""Markers of the figures as characters."""


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write the report of runs: one file that opens offline.

    Args:
        folders: of the runs. Runs that differ in their seed alone become one curve with a band; others are overlaid.
        output: the HTML file; replaced if it is there.

    Returns:
        `output`.

    Raises:
        ConfigError: a folder is not that of a run or is named twice, or a file in it is damaged.
        ModuleNotFoundError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    resolved = [folder.resolve() for folder in folders]
    if twice := [str(folder) for folder in folders if resolved.count(folder.resolve()) > 1]:
        raise ConfigError(f"run={twice[0]!r} is named twice: it would count as two seeds. Name it once")
    if output.is_dir():
        raise IsADirectoryError("it is a folder. Name a file in it")
    runs = [load(folder) for folder in folders]
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        temporary.touch()  # found now, and not after all has been drawn
        temporary.write_text(render(group_runs(runs)), encoding="utf-8")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def render(groups: list[Group]) -> str:
    """The page."""
    swatches = [_swatch(index) for index in range(len(groups))]
    sections = [("Summary", tables.comparison(groups, swatches))]
    absent: list[str] = []
    for name, panels in SECTIONS.items():
        figures = [(panel.title, _panel(panel, groups)) for panel in panels]
        absent += [title for title, drawing in figures if not drawing]
        drawings = [drawing for _, drawing in figures if drawing]
        if name == "Trust region" and (scatter := _agreement(groups)):
            drawings.append(scatter)
        if drawings:
            sections.append((name, f'<div class="grid">{"".join(drawings)}</div>'))
    for title, name, note, stacks in (
        ("Time by phase", "Time", "Mean of a step.", time_stacks(groups)),
        ("Memory by category", "Memory by phase", "Live tensors at the peak of each phase.", memory_stacks(groups)),
    ):
        if stacks is None:
            absent.append(title)
        else:
            sections.append((name, _stacked(title, note, stacks)))
    for name, content in (("Events", tables.events(groups)), ("Completions", tables.completions(groups))):
        if content:
            sections.append((name, content))
        else:
            absent.append(name)
    sections.append(("Settings", tables.settings(groups, swatches)))
    return _page(groups, swatches, sections, absent)


def _panel(panel: Panel, groups: list[Group]) -> str:
    """A figure; empty where no group has data."""
    drawn, present = [], []
    for line in panel.lines:
        bands = [(index, line.of(group)) for index, group in enumerate(groups)]
        known = [figure.Drawn(band, index, line.style) for index, band in bands if band]
        if known:
            present.append((line.label, line.style))
            drawn += known
    if not drawn:
        return ""
    legend = present if len(panel.lines) > 1 else []
    return _figure(
        panel.title,
        panel.note,
        figure.line_chart(drawn, unit=panel.unit, legend=legend, log=panel.log, title=f"{panel.title}, {panel.unit}"),
    )


def _agreement(groups: list[Group]) -> str:
    """Realised against predicted KL, a point a step; empty where no step has both."""
    points = []
    for index, group in enumerate(groups):
        pairs = [
            (planned, realised)
            for run in group.runs
            for step in run.steps
            if (planned := metric("trust/planned_kl")(step)) and (realised := metric("trust/realised_kl")(step))
            if planned > 0 and realised > 0
        ]
        if pairs:
            points.append(([x for x, _ in pairs], [y for _, y in pairs], index))
    if not points:
        return ""
    labels = "predicted KL, nats per token", "realised KL, nats per token"
    drawing = figure.scatter_chart(points, labels=labels, title="Realised against predicted KL, nats per token")
    return _figure("Realised against predicted KL", "A point a step; on the dashed line both agree.", drawing)


def _stacked(title: str, note: str, stacks: Stacks) -> str:
    """Stacked bars, their legend, and the same numbers as a table."""
    drawing = figure.stacked_bars(
        stacks.rows,
        num_categories=len(stacks.categories),
        num_named=figure.NUM_COLOURS - 1,
        unit=stacks.unit,
        title=f"{title}, {stacks.unit}",
    )
    legend = "".join(
        f'<li><span class="block c{index if index < figure.NUM_COLOURS - 1 else "-rest"}"></span>{escape(name)}</li>'
        for index, name in enumerate(stacks.categories)
    )
    header = [f"{stacks.unit}", *map(escape, stacks.categories), "sum"]
    rows = [[escape(label), *map(tables.number, values), tables.number(sum(values))] for label, values in stacks.rows]
    return (
        f'<div class="wide">{_figure(title, note, drawing, legend=f"<ul class=legend>{legend}</ul>")}'
        f"<div>{tables.table(header, rows, name=title)}</div></div>"
    )


def _figure(title: str, note: str, drawing: str, legend: str = "") -> str:
    noted = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3>{noted}</figcaption>{legend}{drawing}</figure>"


def _swatch(index: int) -> str:
    mark = MARKS[figure.MARKERS[index % len(figure.MARKERS)]]
    return f'<span class="mark c{index % figure.NUM_COLOURS}" aria-hidden="true">{mark}</span>'


def _page(groups: list[Group], swatches: list[str], sections: list[tuple[str, str]], absent: list[str]) -> str:
    names = ", ".join(group.label for group in groups)
    runs = "".join(
        f"<li>{swatch} {escape(group.label)}{f' <small>{len(group.runs)} seeds</small>' if len(group.runs) > 1 else ''}</li>"
        for group, swatch in zip(groups, swatches, strict=True)
    )
    links = "".join(f'<a href="#s{index}">{escape(name)}</a>' for index, (name, _) in enumerate(sections))
    body = "".join(
        f'<section id="s{index}"><h2>{escape(name)}</h2>{content}</section>'
        for index, (name, content) in enumerate(sections)
    )
    band = (
        "<p>Curves are means over seeds, bands their range.</p>" if any(len(group.runs) > 1 for group in groups) else ""
    )
    left_out = f"<p>Not recorded by these runs: {escape(', '.join(absent))}.</p>" if absent else ""
    versions = groups[0].runs[0].config.get("versions") or {}
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    style = (files("logra.report") / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>logra report: {escape(names)}</title><style>\n{style}</style></head>\n"
        f"<body><header><h1>Training report</h1><ul class=runs>{runs}</ul></header>"
        f"<nav>{links}</nav><main>{band}{body}</main>"
        f"<footer>{left_out}<p>{escape(made)}</p></footer></body></html>\n"
    )
