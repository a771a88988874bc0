"""What runs, keeps, tabulates and compares benchmarks; `logra.bench` says how to write one."""

from logra.bench.harness.check import Ratio
from logra.bench.harness.options import require_known, require_positive
from logra.bench.harness.results import Cell, Record, Results
from logra.bench.harness.tables import markdown_table, spread

__all__ = ["Cell", "Ratio", "Record", "Results", "markdown_table", "require_known", "require_positive", "spread"]
