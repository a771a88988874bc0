"""kill -9 of a writer: at every step of an append, and at random moments."""

import json
import subprocess
import sys
from pathlib import Path

from logra.sync import DirectoryLog

WRITER = Path(__file__).with_name("kill_writer.py")


def reports(folder: Path, mode: str) -> list[dict]:
    # The limit is for a hang, not for a busy machine.
    result = subprocess.run(
        [sys.executable, str(WRITER), str(folder), mode], check=True, capture_output=True, text=True, timeout=400
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_killed_at_every_step(tmp_path):
    # Catches a file that is visible before it is whole, and an acknowledgement before the update is durable.
    kills = reports(tmp_path, "points")
    assert len(kills) == 48
    for report, following in zip(kills[::2], kills[1::2], strict=True):
        assert report["killed"] and not following["killed"]
        assert report["good"] and following["good"]
        assert report["acknowledged"] <= report["latest"] <= report["acknowledged"] + 1
        # The next writer goes on where the log ends, and cleans up.
        assert following["acknowledged"] == following["latest"] == report["latest"] + 2
    assert {report["latest"] for report in kills[::2]} == {0, 1, 2}
    assert not list(tmp_path.rglob(".tmp-*"))


def test_killed_at_random_moments(tmp_path):
    kills = reports(tmp_path / "log", "random")
    assert len(kills) == 25
    for report in kills:
        assert report["killed"] and report["good"]
        assert report["acknowledged"] <= report["latest"] <= report["acknowledged"] + 1
        assert report["acknowledged"] >= report["before"] + report["awaited"]
    assert sum(report["awaited"] for report in kills) == 36  # 0, 1, 2, 3, 0, ...: it did write meanwhile
    log = DirectoryLog(tmp_path / "log")
    assert [update.version for update in log.read_since(0)] == list(range(1, log.latest() + 1))
