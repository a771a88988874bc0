"""`logra report`: one HTML file about one or several runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from logra.errors import LograError
from logra.report import write_report

DESCRIPTION = (
    "Write a report of one or several runs: a single HTML file that opens offline. Runs that differ in their seed alone "
    "become one curve with a band, others are overlaid and compared."
)
FILE = "report.html"


def report_command(arguments: Sequence[str]) -> int:
    """Run `logra report`.

    Args:
        arguments: those after the command's name.

    Returns:
        The exit code.

    Raises:
        LograError: a folder is not that of a run, or the file cannot be written.
        ModuleNotFoundError: matplotlib is missing.
        SystemExit: --help, or flags that cannot be parsed.
    """
    parser = argparse.ArgumentParser(prog="logra report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, the --output-dir of its training"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the file to write (default: {FILE} in the folder of the run; of several runs, in this folder)",
    )
    options = parser.parse_args(arguments)
    output = options.output or (options.runs[0] / FILE if len(options.runs) == 1 else Path(FILE))
    try:
        print(f"Report written to {write_report(options.runs, output)}")
    except OSError as error:
        raise LograError(f"--output={str(output)!r} cannot be written: {error}") from error
    return 0


def report_of_finished(folder: Path) -> str:
    """Write the report of a run that has just ended; a report that fails must not spoil the run.

    Returns:
        What to tell the user.
    """
    try:
        return f"Report: {write_report([folder], folder / FILE)}"
    except ModuleNotFoundError as error:
        return f"No report was written, since it needs the package {error.name}: pip install 'logra[report]'"
    except Exception as error:  # whatever it is, the run is done and on disk
        return f"No report was written ({type(error).__name__}: {error}). Try again: logra report {folder}"
