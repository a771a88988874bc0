"""What a run shows: plain lines without a terminal, a table with one."""

import io
import re

from rich.console import Console

from logra.rl.display import LiveDisplay, PlainDisplay, cells, make_display

METRICS = {
    "step": 2,
    "reward/mean": 0.125,
    "trust/planned_kl": 0.03,
    "trust/realised_kl": 0.031,
    "memory/peak_bytes": 3 * 2**29,
    "time/rollout_s": 4.0,
    "time/update_s": 8.06,
}


def test_cells():
    assert cells(METRICS) == {
        "reward": "0.125",
        "predicted KL": "0.0300",
        "realised KL": "0.0310",
        "memory": "1.50 GiB",
        "time": "12.1 s",
    }
    # A method without a trust region has no KL, which is not the same as a KL of 0.
    assert cells({})["predicted KL"] == cells({})["realised KL"] == "-"
    # What a rejected step would have realised was not realised.
    assert cells(METRICS | {"sync/bytes": 0.0})["realised KL"] == "no step"
    assert cells(METRICS | {"sync/bytes": 0.0, "reward/frac_zero_std": 1.0})["realised KL"] == "no signal"


def test_plain_lines():
    output = io.StringIO()
    display = make_display(15, Console(file=output, width=40))
    assert isinstance(display, PlainDisplay)
    with display:
        display.add_step(METRICS)
        display.say("a line [with brackets] that is much longer than the console is wide")
    lines = output.getvalue().splitlines()
    assert lines[0] == (
        "step  2/15  reward 0.125  predicted KL 0.0300  realised KL 0.0310  memory 1.50 GiB  time 12.1 s"
    )
    assert lines[1] == "a line [with brackets] that is much longer than the console is wide"


def test_live_table():
    output = io.StringIO()
    display = make_display(15, Console(file=output, width=100, force_terminal=True))
    assert isinstance(display, LiveDisplay)
    with display:
        display.add_step(METRICS)
        display.say("said")
    shown = output.getvalue()
    for text in ("realised KL", "0.0310", "1.50 GiB", "2/15", "said"):
        assert text in shown


def test_a_long_run_is_no_higher_than_the_terminal():
    """Fails for a table that outgrows the screen: lines that scrolled out are printed again with every refresh."""
    output = io.StringIO()
    height = 12
    display = LiveDisplay(40, Console(file=output, width=60, height=height, force_terminal=True))
    with display:
        for step in range(1, 41):
            display.add_step(METRICS | {"step": step, "reward/mean": step / 1000})
            display._live.refresh()
    # A frame is drawn over the one before: the cursor goes up, a line at a time.
    ups = [run.count("\x1b[1A") for run in re.findall(r"(?:\x1b\[1A\x1b\[2K)+", output.getvalue())]
    assert max(ups) == height - 2  # frame of 11 lines
    for step in (1, 20, 40):
        assert f"{step / 1000:.3f}" in output.getvalue()
    last_frame = output.getvalue().rsplit("\x1b[1A", 1)[1]
    assert "0.040" in last_frame and "40/40" in last_frame and "0.020" not in last_frame
