"""Markdown, and the markers in the documentation."""

from pathlib import Path

import pytest

import logra
from logra.bench.harness import markdown_table, spread
from logra.bench.harness.benchmark import find, summaries
from logra.bench.harness.results import read
from logra.bench.harness.tables import write_docs
from logra.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def test_spread_is_mean_and_range():
    assert spread([1.0, 2.0, 6.0]) == "3.00 (1.00-6.00)"
    assert spread([1.25], 1) == "1.2"


def test_a_table():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_the_text_between_the_markers_is_replaced_wherever_they_stand(tmp_path):
    (tmp_path / "docs").mkdir()
    page = "before\n<!-- bench:toy -->\nold\n<!-- /bench:toy -->\nafter\n<!-- bench:toys -->\nother\n<!-- /bench:toys -->\n"
    for path in (tmp_path / "README.md", tmp_path / "docs" / "a.md"):
        path.write_text(page)
    (tmp_path / "docs" / "b.md").write_text("no markers")
    assert write_docs("toy", "new", tmp_path) == [tmp_path / "README.md", tmp_path / "docs" / "a.md"]
    assert (tmp_path / "README.md").read_text() == page.replace("old", "new")


@pytest.mark.parametrize(
    "page", ["", "<!-- bench:toy -->", "<!-- bench:toy -->\n<!-- bench:toy --><!-- /bench:toy -->"]
)
def test_missing_markers_are_refused(tmp_path, page):
    (tmp_path / "README.md").write_text(page)
    with pytest.raises(ConfigError, match="bench:toy"):
        write_docs("toy", "new", tmp_path)
    assert (tmp_path / "README.md").read_text() == page


@pytest.mark.parametrize("path", sorted((REPOSITORY / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.stem)
def test_the_documentation_shows_what_lies_in_the_results(path, tmp_path):
    text = find(path.stem).table(read(path))
    pages = "".join(page.read_text() for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
    assert f"<!-- bench:{path.stem} -->\n{text}\n<!-- /bench:{path.stem} -->" in pages, "run --write-docs"


def test_every_module_of_the_package_is_a_benchmark():
    names = {path.stem for path in (Path(logra.__file__).parent / "bench").glob("*.py")} - {"__init__"}
    assert summaries().keys() == names
    for name, summary in summaries().items():
        benchmark = find(name)
        assert summary and benchmark.cells(benchmark.options()), name


def test_memory_of_methods_side_by_side():
    """Fails if a method, a kind or a category of the memory benchmark is left out of its table."""
    from logra.bench import memory
    from logra.bench.harness.results import Record, Results

    def record(kind, method, result):
        return Record(
            cell={"kind": kind, "method": method}, result=result, machine={}, commit=None, dirty=None, date=None,
            command="", jobs=1, wall_s=1.0,
        )  # fmt: skip

    profile = {
        "peak_bytes": 2**20,
        "peak_phase": "update",
        "at_peak": {"weights": 2**20},
        "resident": {"weights": 2**19},
    }
    records = [record("process", "adamw", {"process_peak_bytes": 4 * 2**30})]
    records += [record("process", "logra", {"process_peak_bytes": 2**30}), record("profile", "logra", profile)]
    text = memory.table(Results("memory", {}, records))
    assert "| logra | 1.00 GiB | 0.25 |" in text and "| adamw | 4.00 GiB | 1.00 |" in text
    assert "1.00 MiB" in text and "512.00 KiB" in text
    assert len(memory.cells(memory.Options())) == 8


def test_settings_are_compared_with_the_default_of_their_own_seed():
    """Fails if differences are taken across seeds, whose policies start apart, or if an axis with one value is shown."""
    from logra.bench import settings
    from logra.bench.harness.results import Record, Results

    def record(arm, seed, accuracy):
        result = {"after": {"trained": accuracy, "heldout": accuracy / 2}, "reward": [0.4], "collateral_kl": [0.2, None],
                  "realised_kl": [0.1, 0.1]}  # fmt: skip
        return Record(
            cell={"arm": arm, "seed": seed}, result=result, machine={}, commit=None, dirty=None, date=None, command="",
            jobs=1, wall_s=1.0,
        )  # fmt: skip

    records = [record("spectral-16-m", 0, 0.50), record("spectral-16-m", 1, 0.70), record("spectral-16-m", 2, 0.1)]
    records += [record("spectral-8-m", 0, 0.51), record("spectral-8-m", 1, 0.73)]
    text = settings.table(Results("settings", {}, records))
    row = "| 8 | 2 | 0.62 (0.51-0.73) | 0.31 (0.26-0.36) | 0.40 (0.40-0.40) | 2000 (2000-2000) | +2.0 ± 1.0 | +1.0 ± 0.5 |"
    assert row in text
    assert (
        "| 16 (default) | 3 | 0.43 (0.10-0.70) | 0.22 (0.05-0.35) |" in text and "| 2000 (2000-2000) | 0 | 0 |" in text
    )
    assert "| rank | seeds |" in text and "bits of the factors" not in text
    assert "32" not in text and "nan" not in text
    alone = settings.table(Results("settings", {}, [record("spectral-8-m", 0, 0.5), record("spectral-32-m", 0, 0.5)]))
    assert alone.count("| 2000 | - | - |") == 2
    assert [cell["seed"] for cell in settings.cells(settings.Options(arms=("spectral-8-m",)))] == [0, 1, 2]
    with pytest.raises(ConfigError, match="spectral-9"):
        settings.Options(arms=("spectral-9",))
    for name in ("num_steps", "num_prompts", "kl_budget"):
        with pytest.raises(ConfigError, match=f"{name}=0"):
            settings.Options(**{name: 0})
