"""The parts of the page that are text: comparison, settings, events, completions. All of them return HTML."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import yaml

from logra.report.groups import Group, differences
from logra.report.memory import phase_seconds
from logra.report.run import Run
from logra.report.series import last_step, mean_of, metric

MAX_EVENTS = 200
NUM_COMPLETIONS = 4
GIB, KIB = 2.0**30, 2.0**10


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, name: str, kind: str = "numbers") -> str:
    """A table that scrolls sideways by itself where it is too wide.

    Args:
        header: HTML of the columns' headings.
        rows: HTML of the cells; the first of a row is its heading.
        name: what a screen reader says.
        kind: class for the style sheet, `numbers` (to the right) or `words` (to the left).
    """
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def comparison(groups: list[Group], swatches: Sequence[str]) -> str:
    """One row a group; means, and ranges over seeds."""
    columns: dict[str, Callable[[Run], str | float | None]] = {
        "steps": lambda run: float(last_step(run)),
        "reward, first 3 steps": lambda run: mean_of(run, metric("reward/mean"), first=3),
        "last 3 steps": lambda run: mean_of(run, metric("reward/mean"), last=3),
        "held-out before": lambda run: metric("before")(run.results.get("heldout") or {}),
        "after": lambda run: metric("after")(run.results.get("heldout") or {}),
        "realised KL, nats per token": lambda run: mean_of(run, metric("trust/realised_kl")),
        "entropy at the end, nats": lambda run: mean_of(run, metric("policy/entropy"), last=3),
        "skipped steps": lambda run: metric("optim/skipped")(run.steps[-1]),
        "s per step": lambda run: None if (seconds := phase_seconds(run)) is None else sum(seconds),
        "peak memory, GiB": lambda run: mean_of(run, metric("memory/peak_bytes", 1 / GIB), last=1),
        "update, KiB": lambda run: mean_of(run, metric("sync/bytes", 1 / KIB)),
    }
    rows = []
    for group, swatch in zip(groups, swatches, strict=True):
        seeds = ", ".join(str(run.seed) for run in group.runs)
        cells = [spread([read(run) for run in group.runs]) for read in columns.values()]
        unfinished = sum(not run.results or bool(run.results.get("interrupted")) for run in group.runs)
        state = f" <small>({unfinished} unfinished)</small>" if unfinished else ""
        rows.append([f"{swatch} {escape(group.label)}{state}", escape(seeds), *cells])
    return table(["run", "seeds", *columns], rows, name="Comparison of the runs")


def spread(values: Sequence[Any]) -> str:
    """Mean, and range where there are several; a dash where a run has none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return "-"
    mean = number(statistics.fmean(known))
    low, high = number(min(known)), number(max(known))
    return mean if low == high else f"{mean} <small>({low} to {high})</small>"


def number(value: float) -> str:
    """Three significant digits, or all of an integer."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e3 else f"{value:.2e}" if abs(value) < 1e-3 else f"{value:,.0f}"


def settings(groups: list[Group], swatches: Sequence[str]) -> str:
    """What differs between the groups, then the whole configuration of each."""
    parts = []
    different = differences(groups)
    if different:
        header = ["setting", *(f"{s} {escape(group.label)}" for s, group in zip(swatches, groups, strict=True))]
        rows = [
            [f"<code>{escape(name)}</code>", *(escape(str(value)) for value in row)] for name, row in different.items()
        ]
        parts.append(f"<h3>What differs</h3>{table(header, rows, name='Settings that differ', kind='words')}")
    for group in groups:
        text = yaml.safe_dump(group.runs[0].config, sort_keys=False, allow_unicode=True)
        seeds = f", seeds {', '.join(str(run.seed) for run in group.runs)}" if len(group.runs) > 1 else ""
        parts.append(
            f"<details><summary>config.yaml of {escape(group.label)}{escape(seeds)}</summary>"
            f"<pre>{escape(text)}</pre></details>"
        )
    return "".join(parts)


def events(groups: list[Group]) -> str:
    """What guards did, and steps without an update; empty if there was nothing."""
    rows = [(run, event) for group in groups for run in group.runs for event in run_events(run)]
    if not rows:
        return ""
    counts = Counter(f"{event['kind']}: {event['action']}" for _, event in rows)
    summary = ", ".join(f"{escape(what)} ({count})" for what, count in counts.most_common())
    shown = rows[-MAX_EVENTS:]
    cut = f" The last {MAX_EVENTS} of {len(rows)} are listed." if len(rows) > MAX_EVENTS else ""
    several = sum(len(group.runs) for group in groups) > 1
    body = [
        [
            escape(str(event["step"])),
            *([escape(run.folder.resolve().name)] if several else []),
            escape(str(event["kind"])),
            _cell(event.get("value")),
            _cell(event.get("threshold")),
            f"<b>{escape(str(event['action']))}</b>",
            escape(str(event.get("detail") or "")),
        ]
        for run, event in shown
    ]
    header = ["step", *(["run"] if several else []), "kind", "value", "threshold", "action", "detail"]
    return f"<p>{summary}.{cut}</p>{table(header, body, name='Events', kind='words')}"


def run_events(run: Run) -> list[dict[str, Any]]:
    """Lines of events.jsonl, and the steps in which the optimizer's count of skipped steps rose."""
    found = [{"step": 0, "kind": "?", "action": "?"} | event for event in run.events]
    told = {event["step"] for event in found if event["action"] == "skip"}
    before = 0.0
    for step in run.steps:
        skipped = metric("optim/skipped")(step)
        if skipped is not None and skipped > before:
            if step["step"] not in told:
                why = "no group's rewards differed: " if metric("reward/frac_zero_std")(step) == 1 else ""
                detail = why + "the optimizer left the weights as they were"
                found.append({"step": step["step"], "kind": "optimizer", "action": "skip", "detail": detail})
            before = skipped
    return sorted(found, key=lambda event: event["step"])


def completions(groups: list[Group]) -> str:
    """Sampled completions of the first and the last step of the first run of each group; empty if there are none."""
    parts = []
    for group in groups:
        samples = group.runs[0].samples
        if not samples:
            continue
        steps = sorted({sample["step"] for sample in samples})
        columns = "".join(
            f"<div><h4>{when}, step {escape(str(step))}</h4>{_completions_of(samples, step)}</div>"
            for when, step in (("before", steps[0]), ("after", steps[-1]))[: len(steps)]
        )
        title = f"<h3>{escape(group.label)}</h3>" if len(groups) > 1 else ""
        parts.append(f'{title}<div class="pair">{columns}</div>')
    return "".join(parts)


def _completions_of(samples: list[dict[str, Any]], step: int) -> str:
    chosen = [sample for sample in samples if sample["step"] == step][:NUM_COMPLETIONS]
    return "".join(
        f'<figure class="sample"><pre class="prompt">{escape(_text(sample["prompt"]))}</pre>'
        f"<pre>{escape(_text(sample['completion'])) or '<i>empty</i>'}</pre>"
        f"<figcaption>reward {_cell(sample.get('reward'))}</figcaption></figure>"
        for sample in chosen
    )


def _text(value: Any) -> str:
    """A prompt is a string, or messages with roles."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in value)
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return number(float(value)) if isinstance(value, (int, float)) else escape(str(value))
