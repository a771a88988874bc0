"""`logra bench`: runs benchmarks, prints their tables, keeps the documentation's tables up to date, finds regressions."""

import dataclasses
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings

from logra.bench.harness.benchmark import Benchmark, find, summaries
from logra.bench.harness.check import Ratio, best_of, losses, read_baselines, write_baselines
from logra.bench.harness.results import read_cells, require_writable
from logra.bench.harness.runner import run
from logra.bench.harness.tables import write_docs
from logra.cli.train import TrainParser
from logra.errors import ConfigError

NUM_ATTEMPTS = 3
"""Runs of a check until nothing is lost: a busy machine can spoil one."""


def bench_command(arguments: Sequence[str]) -> int:
    """Run `logra bench`.

    Args:
        arguments: those after the command's name.

    Returns:
        The exit code: 0, or 1 where a check found a regression.

    Raises:
        LograError: no such benchmark, an option that is not allowed, no results, or cells that failed.
        SystemExit: flags that cannot be parsed, or the help of a benchmark.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0 if arguments else 2
    if arguments[0] == "check":
        return _check_command(arguments[1:])
    benchmark = find(arguments[0])
    settings = build_parser(benchmark).parse_args(_normalised(arguments[1:], benchmark))
    options = benchmark.options(**{name: settings[name] for name in _fields(benchmark)})
    path = Path(settings["results_dir"]) / f"{benchmark.name}.json"
    if settings["table"] or settings["write_docs"]:
        results = read_cells(path, benchmark.name, options)
    else:
        command = shlex.join(["logra", "bench", *arguments])
        results = run(benchmark, options, path, command=command, jobs=settings["jobs"])
    text = benchmark.table(results)
    print(text)
    if settings["write_docs"]:
        for page in write_docs(benchmark.name, text, Path.cwd()):
            print(f"Written to {page}")
        if benchmark.figure is not None:
            picture = Path("docs", "figures", f"{benchmark.name}.svg")
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_text(benchmark.figure(results), encoding="utf-8")
            print(f"Written to {picture}")
    return 0


def build_parser(benchmark: Benchmark) -> TrainParser:
    """The parser of one benchmark."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = TrainParser(
        prog=f"logra bench {benchmark.name}", description=summaries().get(benchmark.name), allow_abbrev=False
    )
    _add_folder(parser, "--results_dir", "benchmarks/results", "Folder of the results file.")
    parser.add_argument(
        "--jobs", type=int, default=1, help="Cells that run at the same time, in processes of one thread."
    )
    parser.add_argument("--table", action="store_true", help="Print the table of the results so far; run nothing.")
    parser.add_argument(
        "--write_docs",
        action="store_true",
        help="As --table, and write it into README.md and docs/*.md in this folder.",
    )
    parser.add_class_arguments(benchmark.options, as_group=True)
    return parser


def _check_command(arguments: Sequence[str]) -> int:
    """Compare the ratios of quick runs with the baselines."""
    parser = TrainParser(
        prog="logra bench check",
        description="Run the quick setting of benchmarks and compare ratios with the baselines that were kept.",
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", help="Benchmarks; all that can be checked if none is named.")
    _add_folder(parser, "--baselines_dir", "benchmarks/baselines", "Folder of the baselines, a file a benchmark.")
    parser.add_argument("--save_baseline", action="store_true", help="Keep what is measured as the new baseline.")
    settings = parser.parse_args([_underscored(token) for token in arguments])
    chosen = [find(name) for name in dict.fromkeys(settings["names"] or summaries())]
    for benchmark in chosen:
        if benchmark.ratios is None and settings["names"]:
            raise ConfigError(f"benchmark {benchmark.name!r} has no ratios to check")
    folder = Path(settings["baselines_dir"])
    paths = [(benchmark, folder / f"{benchmark.name}.json") for benchmark in chosen if benchmark.ratios is not None]
    if settings["save_baseline"]:
        require_writable(folder, "--baselines-dir")
        for benchmark, path in paths:
            write_baselines(path, measured := _measure(benchmark))
            print("\n".join(f"{benchmark.name} {name}: {ratio.value:.3f}, saved" for name, ratio in measured.items()))
        return 0
    kept = [(benchmark, read_baselines(path)) for benchmark, path in paths]  # all, before minutes go into the first
    lost = [f"{benchmark.name} {line}" for benchmark, baselines in kept for line in _compare(benchmark, baselines)]
    print("\n".join(lost) if lost else "No ratio is more than 10 % worse than its baseline.")
    return 1 if lost else 0


def _compare(benchmark: Benchmark, baselines: Mapping[str, Ratio]) -> list[str]:
    measured = _measure(benchmark)
    for _ in range(NUM_ATTEMPTS - 1):
        if not losses(measured, baselines):
            break
        measured = best_of(measured, _measure(benchmark))
    for name, ratio in measured.items():
        baseline = f"baseline {baselines[name].value:.3f}" if name in baselines else "no baseline: --save-baseline"
        print(f"{benchmark.name} {name}: {ratio.value:.3f} ({baseline})")
    return losses(measured, baselines)


def _measure(benchmark: Benchmark) -> Any:
    assert benchmark.ratios is not None
    with tempfile.TemporaryDirectory(prefix="logra-bench-") as folder:
        path = Path(folder, f"{benchmark.name}.json")
        return benchmark.ratios(run(benchmark, benchmark.check, path, command=f"logra bench check {benchmark.name}"))


def _add_folder(parser: TrainParser, flag: str, default: str, text: str) -> None:
    parser.add_argument(flag, type=str, default=default, metavar="DIR", help=text)


def _usage() -> str:
    width = max(map(len, ("check", *summaries()))) + 2
    listed = "\n".join(f"  {name:{width}}{summary}" for name, summary in summaries().items())
    return (
        "usage: logra bench NAME [options]\n\n"
        "Run a benchmark, cell by cell; an interrupted one goes on where it stopped.\n\n"
        f"benchmarks:\n{listed}\n\n"
        f"  {'check':{width}}Compare ratios of quick runs with baselines; fails on a loss of more than 10 %\n\n"
        "logra bench NAME --help shows the options of a benchmark, their defaults and units.\n"
    )


def _fields(benchmark: Benchmark) -> dict[str, bool]:
    """Names of the options of a benchmark, and whether they hold several values."""
    return {field.name: isinstance(field.default, tuple) for field in dataclasses.fields(benchmark.options)}


def _normalised(arguments: Sequence[str], benchmark: Benchmark) -> list[str]:
    """Flags as the parser knows them: with underscores, and several values (`--seeds 0 1`) as a list."""
    holds_several = _fields(benchmark)
    tokens: list[str] = []
    waiting = [_underscored(token) for token in arguments]
    while waiting:
        token = waiting.pop(0)
        name, equals, value = token.partition("=")
        if token.startswith("--") and holds_several.get(token[2:]):
            values = []
            while waiting and not waiting[0].startswith("--"):
                values.append(waiting.pop(0))
            if values and not values[0].startswith("["):
                values = [f"[{','.join(values)}]"]
            tokens += [token, *values]
        elif equals and value and not value.startswith("[") and holds_several.get(name[2:]):
            tokens.append(f"{name}=[{value}]")
        else:
            tokens.append(token)
    return tokens


def _underscored(token: str) -> str:
    name, equals, value = token.partition("=")
    return (f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name) + equals + value
