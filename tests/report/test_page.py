"""The page as a whole: offline, complete, escaped, valid."""

import re
from html.parser import HTMLParser

import pytest

from logra.errors import ConfigError
from logra.report import figure, write_report
from logra.report.groups import group_runs
from logra.report.panels import SECTIONS
from logra.report.run import load
from logra.report.series import Band
from logra.report.tables import number, run_events, spread

VOID = {"meta", "link", "br", "hr", "img"}


class Balance(HTMLParser):
    """Fails on a tag that is not closed in its order, and gathers ids and text."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def everything(make_run, name, **settings):
    prompt = [{"role": "user", "content": "<p>"}]
    samples = [{"step": s, "prompt": prompt, "completion": f"c{s}</pre>", "reward": 0.5} for s in (1, 2, 4)]
    event = {"step": 3, "kind": "collapse", "value": 0.1, "threshold": 0.2, "action": "rollback", "detail": "<b>"}
    results = {"heldout": {"before": 0.25, "after": 0.5}, "interrupted": False}
    memory = {"phases": {"forward": {"at_peak": {"weights": 2**31, "logits": 2**29}}}}
    return make_run(name, samples=samples, events=[event], results=results, memory=memory, **settings)


@pytest.fixture(scope="module")
def page(make_shared_run, tmp_path_factory):
    """Two seeds and another rank, with all that a run can record, and text that must be escaped."""
    runs = [
        everything(make_shared_run, "a-0"),
        everything(make_shared_run, "a-1", seed=1, start=0.3),
        everything(make_shared_run, "<b>", rank=8),
    ]
    return write_report(runs, tmp_path_factory.mktemp("report") / "new" / "report.html").read_text()


def test_the_page_is_whole(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    text = " ".join(" ".join(parser.texts).split())
    for part in ("Reward", "Held-out score", "Realised against predicted KL", "Time by phase", "Memory by category"):
        assert part in text
    assert "optimizer step" in text and "nats per token" in text and "GiB" in text  # axes and their units are text
    assert "collapse: rollback (3)" in text
    assert "before, step 1" in text and "after, step 4" in text and "c4</pre>" in text and "c2</pre>" not in text
    assert "logra.rank 32 8" in text
    assert "0.2 (0.1 to 0.3)" not in text and "Not recorded by these runs: Policy entropy" in text


def test_nothing_is_fetched(page):
    assert "http" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=(?!\"(#|data:,))", page) and "@import" not in page and "url(h" not in page


def test_what_runs_wrote_cannot_break_the_page(page):
    assert "<b> </li>" not in page and "&lt;b&gt;" in page and "c4&lt;/pre&gt;" in page


def test_ids_are_referred_to_and_colours_come_from_the_style_sheet(page):
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert drawings
    for drawing in drawings:
        used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", drawing))
        ids = set(re.findall(r'id="([^"]+)"', drawing))
        assert {one or other for one, other in used} >= ids
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= {"#000000", "#ffffff"}, (
            "a colour that dark mode cannot change"
        )
        assert 'aria-label="' in drawing and not re.search(r"<svg[^>]*(width|height)=", drawing)


def test_both_colour_schemes_define_what_the_figures_use(page):
    light, dark = page[page.index("<style>") :].split("@media (prefers-color-scheme: dark)", 1)
    for variable in set(re.findall(r"var\((--\w+)\)", page)):
        assert f"{variable}:" in light and f"{variable}:" in dark.split("* {")[0], variable


def test_a_bare_run_has_a_report(make_run, tmp_path):
    text = write_report([make_run("a", num_steps=1)], tmp_path / "report.html").read_text()
    assert "1 unfinished" in text and "Memory by category" in text  # among what was not recorded
    assert '<section id="s0">' in text and "Completions</h2>" not in text


def test_a_report_that_fails_leaves_the_old_one(make_run, tmp_path):
    output = tmp_path / "report.html"
    output.write_text("old")
    with pytest.raises(ValueError, match="must be the folder of a run"):
        write_report([make_run("a"), tmp_path], output)
    assert output.read_text() == "old"


def test_an_output_that_cannot_be_written_is_found_before_anything_is_drawn(make_run, tmp_path, monkeypatch):
    def render(groups):
        raise AssertionError("drawn")

    monkeypatch.setattr("logra.report.page.render", render)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "folder", tmp_path / "file" / "report.html"):
        with pytest.raises(OSError, match=r"folder|file"):
            write_report([make_run(f"run-{output.name}")], output)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_run_named_twice_is_not_two_seeds(make_run, tmp_path):
    folder = make_run("a")
    with pytest.raises(ConfigError, match="named twice"):
        write_report([folder, folder / ".." / "a"], tmp_path / "report.html")


def test_numbers_that_nobody_can_draw_are_left_out(make_run, tmp_path):
    """Also a name that mathtext would read as an unfinished formula."""
    folder = make_run("a ${b", num_steps=1)
    text = '{"step": 2, "reward/mean": 1e308, "policy/entropy": NaN, "trust/realised_kl": %s}' % (400 * "1")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{text}\n{text.replace('2', '3', 1)}\n")
    (folder / "results.json").write_text('{"heldout": {"before": NaN, "after": "x"}}')
    page = write_report([folder, make_run("other $", method="adamw")], tmp_path / "report.html").read_text()
    assert "nan" not in page.lower() and "e+308" not in page


def test_skips_are_events_once(make_run):
    folder = make_run(
        "a", events=[{"step": 2, "kind": "loss", "value": 1, "threshold": None, "action": "skip", "detail": ""}]
    )
    run = load(folder)
    for step, skipped in zip(run.steps, (0, 1, 1, 2), strict=True):
        step["optim/skipped"] = float(skipped)
    assert [(event["step"], event["kind"]) for event in run_events(run)] == [(2, "loss"), (4, "optimizer")]


def test_numbers_are_short():
    shown = [number(value) for value in (0.0, 3.0, 0.12345, 1.5e-5, 12345.6)]
    assert shown == ["0", "3", "0.123", "1.50e-05", "12,346"]
    assert spread([0.1, None, 0.3]) == "0.2 <small>(0.1 to 0.3)</small>"
    assert spread([0.1, 0.1]) == "0.1" and spread([None]) == "-"


def test_a_skip_without_signal_says_so(make_run):
    run = load(make_run("a", num_steps=2))
    for step, share in zip(run.steps, (0.5, 1.0), strict=True):
        step |= {"optim/skipped": float(step["step"]), "reward/frac_zero_std": share}
    assert ["rewards differed" in event["detail"] for event in run_events(run)] == [False, True]


def test_a_budget_that_only_prices_a_run_does_not_flatten_the_panel(make_run):
    """Fails if the axis spans to a budget of a million that LoRA, priced but not bounded, has in every step."""
    (panel,) = (panel for panel in SECTIONS["Trust region"] if panel.title.startswith("KL of a step"))
    budget = next(line for line in panel.lines if line.label == "budget")
    (group,) = group_runs([load(make_run("a"))])
    for step, value in zip(group.runs[0].steps, (1e6, 0.03, 2.9, 4.1), strict=True):
        step["trust/budget"] = value  # planned: 0.01, 0.02, 0.03, 0.04
    assert budget.of(group).steps == [2, 3]


def _heights(drawing, text):
    """Vertical positions of texts in a drawing, in points from its top: (of `text`, of the highest tick of the y axis)."""
    own = re.search(rf'<text[^>]*\by="([\d.]+)"[^>]*>{text}</text>', drawing)
    translated = [float(y) for y in re.findall(r'transform="translate\([\d.]+ ([\d.]+)\)">\s*<text>\s*<tspan', drawing)]
    assert own and translated
    return float(own[1]), min(translated)


def test_the_legend_keeps_off_the_highest_tick():
    band = Band([1, 2], [0.003, 0.1], [0.003, 0.1], [0.003, 0.1])
    legend = [("predicted", "dashed"), ("realised", "solid")]
    drawing = figure.line_chart([figure.Drawn(band, 0, "solid")], unit="u", legend=legend, log=True, title="t")
    own, highest = _heights(drawing, "predicted")
    # Boxes of letters, as measured in a browser: an exponent's ends 1.9 font sizes above the baseline of its tick, that of
    # the legend 0.4 below its own.
    assert highest - own >= (1.9 + 0.4) * figure.FONT_PT


def test_bars_have_the_text_size_of_curves():
    """On a phone every figure is as wide as the screen: a wider drawing has smaller letters."""

    def width(label):
        drawing = figure.stacked_bars([(label, [1.0])], num_categories=1, unit="u", title="t", num_named=1)
        return float(re.findall(r'viewBox="0 0 ([\d.]+)', drawing)[0]) / 72

    assert width("logra: between steps") == pytest.approx(figure.WIDTH_IN)
    assert width("x" * 60) == pytest.approx(figure.WIDTH_IN + 1.2)  # room for bars


@pytest.mark.parametrize(("low", "is_log"), [(0.001, True), (0.5, False), (0.0, False)])
def test_logarithmic_only_where_it_can_be_read(low, is_log):
    band = Band([1, 2], [low, 1.0], [low, 1.0], [low, 1.0])
    drawing = figure.line_chart([figure.Drawn(band, 0, "solid")], unit="u", legend=[], log=True, title="t")
    assert ("tspan" in drawing or "times" in drawing) == is_log  # powers of ten


def test_ten_groups_are_told_apart(make_run):
    groups = group_runs([load(make_run(f"r{rank}", rank=rank)) for rank in range(1, 11)])
    looks = {(figure.colour(index), figure.MARKERS[index % len(figure.MARKERS)]) for index, _ in enumerate(groups)}
    assert len(looks) == 10
