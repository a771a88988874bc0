"""What a run shows: plain lines without a terminal, a table with one."""

import io

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
