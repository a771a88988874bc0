"""Which benchmarks there are, and what a module must define to be one."""

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import logra.bench
from logra.bench.harness.check import Ratio
from logra.bench.harness.results import Cell, Results
from logra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark module, checked."""

    name: str
    """Last part of the module's name."""
    module: str
    """Full name of the module: what a cell's process imports."""
    options: type[Any]
    """Frozen dataclass of options."""
    cells: Callable[[Any], list[Cell]]
    run_cell: Callable[[Cell, Any], dict[str, Any]]
    table: Callable[[Results], str]
    figure: Callable[[Results], str] | None = None
    """SVG of the results, which `--write-docs` keeps as docs/figures/NAME.svg; None: there is none."""
    check: Any = None
    """Options of the quick run that `make bench-check` makes; None: there is nothing to check."""
    ratios: Callable[[Results], dict[str, Ratio]] | None = None


def summaries() -> dict[str, str]:
    """The benchmarks in this package and what each measures, without importing any."""
    found = {}
    for info in pkgutil.iter_modules(logra.bench.__path__):
        if not info.ispkg:
            spec = importlib.util.find_spec(f"logra.bench.{info.name}")
            assert spec is not None and spec.origin is not None
            with open(spec.origin, encoding="utf-8") as source:
                docstring = ast.get_docstring(ast.parse(source.read())) or ""
            found[info.name] = docstring.split("\n")[0].rstrip(".")
    return found


def find(name: str) -> Benchmark:
    """The benchmark of this package with a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in summaries():
        raise ConfigError(f"benchmark {name!r}: one of {', '.join(summaries())}")
    return load(f"logra.bench.{name}")


def load(module_name: str) -> Benchmark:
    """The benchmark that a module defines.

    Raises:
        TypeError: it lacks one of the names that make it a benchmark.
    """
    module = importlib.import_module(module_name)
    missing = [name for name in ("Options", "cells", "run_cell", "table") if not hasattr(module, name)]
    if missing:
        raise TypeError(f"{module_name} is no benchmark: it does not define {', '.join(missing)}")
    if hasattr(module, "CHECK") != hasattr(module, "ratios"):
        raise TypeError(f"{module_name}: CHECK and ratios go together")
    return Benchmark(
        name=module_name.rpartition(".")[2],
        module=module_name,
        options=module.Options,
        cells=module.cells,
        run_cell=module.run_cell,
        table=module.table,
        figure=getattr(module, "figure", None),
        check=getattr(module, "CHECK", None),
        ratios=getattr(module, "ratios", None),
    )
