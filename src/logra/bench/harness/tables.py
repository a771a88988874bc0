"""Markdown of results, and where it goes in the documentation."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from logra.errors import ConfigError


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and range over seeds: `0.71 (0.70-0.72)`; of one value, the value."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    Args:
        header: names of the columns.
        rows: as many strings each.
    """
    lines = [list(header), *map(list, rows)]
    assert all(len(line) == len(header) for line in lines), "every row has as many cells as the header"
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|---" * len(header) + "|", *text[1:]])


def write_docs(name: str, text: str, root: Path) -> list[Path]:
    """Put a table between its markers, wherever they stand in README.md and docs/*.md.

    Args:
        name: of the benchmark.
        text: its table.
        root: folder of README.md.

    Returns:
        The files that have its markers.

    Raises:
        ConfigError: no file has them, or one has an opening marker without its closing one.
    """
    opening, closing = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    written = []
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        if not path.exists():
            continue
        page = path.read_text(encoding="utf-8")
        if opening not in page:
            continue
        before, _, rest = page.partition(opening)
        _, found, after = rest.partition(closing)
        if not found or opening in rest:
            raise ConfigError(f"{path}: {opening} must be there once, and {closing} after it")
        path.write_text(f"{before}{opening}\n{text}\n{closing}{after}", encoding="utf-8")
        written.append(path)
    if not written:
        raise ConfigError(f"no file in {root}/docs, nor {root}/README.md, has the line {opening}")
    return written
