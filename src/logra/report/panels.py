"""Which curves a report shows: titles, metrics, units. A panel without data in any run is left out and named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from logra.report.groups import Group
from logra.report.series import Band, Reading, curve, heldout, metric

Style = Literal["solid", "dashed", "dotted"]
KIB = 2.0**-10
GIB = 2.0**-30
FAR = 100
"""A budget above this many times the predicted KL only prices a run: it bounds nothing."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One quantity of a panel, drawn for every group."""

    label: str
    """In the panel's legend; empty where the panel has one quantity."""
    of: Callable[[Group], Band]
    style: Style = "solid"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One figure over the steps."""

    title: str
    unit: str
    """Label of the vertical axis."""
    lines: tuple[Line, ...]
    log: bool = False
    """Logarithmic vertical axis."""
    note: str = ""
    """A sentence below the title."""


def _line(label: str, read: Reading, style: Style = "solid") -> Line:
    return Line(label=label, of=lambda group: curve(group, read), style=style)


def _single(title: str, unit: str, name: str, scale: float = 1.0, note: str = "", *, log: bool = False) -> Panel:
    return Panel(title=title, unit=unit, lines=(_line("", metric(name, scale)),), note=note, log=log)


def _budget(step: dict[str, Any]) -> float | None:
    """The budget of a step; None where it is so far off that its line would flatten the others of the panel."""
    budget, planned = metric("trust/budget")(step), metric("trust/planned_kl")(step)
    return None if budget is None or (planned is not None and budget > FAR * planned) else budget


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        _single("Reward", "mean reward per completion", "reward/mean"),
        Panel(
            title="Held-out score",
            unit="mean score",
            lines=(Line(label="", of=heldout),),
            note="Before and after training, greedy, on problems that were not trained on.",
        ),
        _single("Policy entropy", "nats per token", "policy/entropy"),
        Panel(
            title="Completion length",
            unit="tokens",
            lines=(
                _line("mean", metric("completions/mean_length")),
                _line("longest", metric("completions/max_length"), "dotted"),
            ),
        ),
        _single("Completions cut off at the limit", "share of completions", "completions/clipped_ratio"),
        _single("Groups without signal", "share of groups", "reward/frac_zero_std"),
    ),
    "Trust region": (
        Panel(
            title="KL of a step: predicted, realised, budget",
            unit="nats per token",
            lines=(
                _line("predicted", metric("trust/planned_kl"), "dashed"),
                _line("realised", metric("trust/realised_kl")),
                _line("budget", _budget, "dotted"),
            ),
            log=True,
            note="Predicted for the step as taken, realised as measured with the rounded update. "
            f"A budget above {FAR} times the prediction is not drawn.",
        ),
        _single("Scale of the step, α", "multiple of the proposed step", "trust/alpha"),
        _single("Rollout and trainer mismatch", "nats per token", "trust/mismatch"),
    ),
    "Update": (
        _single("Relative update", "‖ΔW‖ / ‖W‖", "optim/update_ratio", log=True),
        _single("Gradient norm", "norm of the sketched gradient", "optim/grad_norm"),
        _single("Coherence of successive gradients", "share of a step's length", "optim/coherence"),
        Panel(
            title="Direction against the dense gradient",
            unit="cosine",
            lines=(
                _line("estimated gradient", metric("direction/gradient_cosine")),
                _line("final update", metric("direction/update_cosine"), "dashed"),
            ),
            note="Mean over the layers that the probe watches.",
        ),
    ),
    "Synchronisation and memory": (
        _single("Update sent to replicas", "KiB per step", "sync/bytes", KIB),
        _single("Time to publish it", "s per step", "sync/seconds"),
        _single("Peak memory so far", "GiB", "memory/peak_bytes", GIB, "Of the process; on CUDA of the allocator."),
    ),
}
"""Headings of the page and the panels below each."""
