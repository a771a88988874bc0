"""What a run shows while it trains: a table and a progress bar on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

GIB = 2**30

_FRAME_LINES = 6
"""Lines beside the rows: three rules and the header of the table, the progress bar, and the line of the cursor."""


_MOST_ROWS = 200
"""Rows that are kept: more than any terminal is high."""


class Display(Protocol):
    """Shows the steps of a run. A context manager around the training."""

    def __enter__(self) -> "Display": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Show one finished step."""
        ...

    def say(self, text: str) -> None:
        """Show a line of text."""
        ...


def make_display(num_steps: int, console: Console | None = None) -> Display:
    """A live table on a terminal, plain lines where the output is piped or logged."""
    console = console or Console()
    return LiveDisplay(num_steps, console) if console.is_terminal else PlainDisplay(num_steps, console)


def cells(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a step. KLs are nats per token, of the step as taken; a method without a prediction has none."""

    def number(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    reason = None
    if metrics.get("sync/bytes") == 0:  # without a signal, the trust region or a guard kept the weights as they were
        reason = "no signal" if metrics.get("reward/frac_zero_std") == 1 else "no step"
    seconds = metrics.get("time/rollout_s", 0.0) + metrics.get("time/update_s", 0.0)
    return {
        "reward": number("reward/mean", ".3f"),
        "predicted KL": number("trust/planned_kl", ".4f"),
        "realised KL": reason or number("trust/realised_kl", ".4f"),
        "memory": f"{metrics.get('memory/peak_bytes', 0) / GIB:.2f} GiB",
        "time": f"{seconds:.1f} s",
    }


class PlainDisplay:
    """One line per step."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self._num_steps = num_steps
        self._console = console

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Print the step."""
        width = len(str(self._num_steps))
        row = "  ".join(f"{name} {value}" for name, value in cells(metrics).items())
        self.say(f"step {metrics['step']:{width}}/{self._num_steps}  {row}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay:
    """A table of the last steps over a progress bar. It is never higher than the terminal, since what has scrolled out
    of the screen cannot be drawn anew and would be printed again with every refresh.
    """

    def __init__(self, num_steps: int, console: Console) -> None:
        self._console = console
        self._rows: list[tuple[str, ...]] = []
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._bar = self._progress.add_task("training", total=num_steps)
        self._live = Live(get_renderable=self._view, console=console, refresh_per_second=4, vertical_overflow="crop")

    def _view(self) -> Group:
        table = Table()
        for name in ("step", *cells({})):
            table.add_column(name, justify="right", no_wrap=True)
        num_rows = max(self._console.height - _FRAME_LINES, 1)
        for row in self._rows[-num_rows:]:
            table.add_row(*row)
        return Group(table, self._progress)

    def __enter__(self) -> "LiveDisplay":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Add a row."""
        self._rows.append((str(metrics["step"]), *cells(metrics).values()))
        del self._rows[:-_MOST_ROWS]
        self._progress.update(self._bar, completed=metrics["step"])

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, highlight=False, markup=False)
