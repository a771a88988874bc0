"""Tables of memory."""

from logra.memory.table import method_table, profile_text, readable

ADAMW = {
    "peak_bytes": 1000 * 2**20,
    "peak_phase": "update",
    "at_peak": {"weights": 250 * 2**20, "gradients": 250 * 2**20, "optimizer_state": 500 * 2**20},
    "resident": {"weights": 250 * 2**20, "optimizer_state": 500 * 2**20},
    "phases": {"update": {"peak_bytes": 1000 * 2**20}},
}
LOGRA = {
    "peak_bytes": 300 * 2**20,
    "peak_phase": "backward",
    "at_peak": {"weights": 250 * 2**20, "activations": 50 * 2**20},
    "resident": {"weights": 250 * 2**20},
}


def row(table, start):
    return next(line for line in table.splitlines() if line.startswith(start))


def test_rows_are_marked_by_what_differs_between_methods():
    table = method_table({"adamw": ADAMW, "logra": LOGRA})
    assert row(table, "weights").endswith("constant") and row(table, "dense gradients").endswith("changed")
    assert "250.00 MiB" in row(table, "weights") and "0 B" in row(table, "dense gradients")
    assert "1000.00 MiB" in row(table, "sum at the peak") and "300.00 MiB" in row(table, "sum at the peak")
    assert row(table, "phase of the peak").split()[-2:] == ["update", "backward"]
    assert "gradient sketches" not in table  # no method has any


def test_a_single_method_is_marked_against_dense_adamw():
    text = profile_text("adamw", ADAMW)
    assert row(text, "weights").endswith("constant") and row(text, "optimizer state").endswith("changed")
    assert "Peak of each phase: update 1000.00 MiB" in text
    assert "4,096 x 4,096" in text and "16.8 M" in text and "1.05 M" in text and "arrays alone" in text


def test_markdown_has_one_cell_per_method():
    lines = method_table({"adamw": ADAMW, "logra": LOGRA}, markdown=True).splitlines()
    assert lines[1] == "|---|---|---|---|" and all(line.count("|") == 5 for line in lines)


def test_a_refused_method_is_a_column_without_figures():
    """Fails if it counts as 0 B: then every row of the one method that was planned would differ."""
    table = method_table({"adamw": {"refused": "its head is tied"}, "logra": LOGRA})
    assert row(table, "at the peak").split()[-3:] == ["adamw", "(refused)", "logra"]
    assert row(table, "sum at the peak").split()[-3:] == ["-", "300.00", "MiB"]
    assert row(table, "weights").endswith("constant") and "0 B" not in table


def test_readable():
    assert [readable(n) for n in (0, 1023, 1024, 1536 * 2**10, 36.1 * 2**30)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "36.10 GiB",
    ]  # fmt: skip
