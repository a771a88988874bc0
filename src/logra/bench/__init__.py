"""Benchmarks that anyone can rerun: `logra bench NAME`.

Every module directly in this package is a benchmark; the first line of its docstring is what `logra bench --help` says
of it. What several benchmarks share lies in subpackages. A benchmark defines

    from logra.bench.harness import Cell, Ratio, Results, markdown_table, spread

    @dataclass(frozen=True, kw_only=True)
    class Options:                                        # flags of `logra bench NAME`; a docstring under each field
        seeds: tuple[int, ...] = (0, 1, 2)
        num_steps: int = 150

    def cells(options: Options) -> list[Cell]: ...        # small JSON objects: {"arm": "logra", "seed": 0}
    def run_cell(cell: Cell, options: Options) -> dict[str, Any]: ...   # JSON-able numbers of one cell
    def table(results: Results) -> str: ...               # Markdown, from what lies in the file

if a picture says more,

    def figure(results: Results) -> str: ...              # SVG, kept as docs/figures/NAME.svg by --write-docs

and, if a loss of speed or memory should fail `make bench-check`,

    CHECK = Options(...)                                  # a run of a minute or two
    def ratios(results: Results) -> dict[str, Ratio]: ... # never seconds: they belong to one machine

Contract:
- A cell runs in a process of its own with OMP_NUM_THREADS=1 unless the environment sets it. What is to be compared in
  time belongs in one cell, interleaved.
- A cell is known by its JSON object. A field of Options that is a tuple lists values of which every cell names one;
  any other field is a setting of all cells, and a results file holds cells of one setting only.
- Results lie in `benchmarks/results/NAME.json` and are written as soon as a cell ends: an interrupted benchmark goes on
  where it stopped. Each cell keeps the commit, machine, versions, date and command that it ran with.
- Names of fields carry units (`_s`, `_bytes`); tables say how many seeds and show mean and range (`spread`).

`logra bench NAME --write-docs` replaces what lies between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` in README.md
and docs/*.md by the table.
"""
