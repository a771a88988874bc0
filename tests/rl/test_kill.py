"""kill -9 of a training run at random points, and what a resumed run makes of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLER = Path(__file__).with_name("kill_run.py")
PHASES = {"rollout", "backward", "update", "append", "records", "checkpoint"}


def kills(model_folder: Path, work: Path, *wanted: str) -> list[dict]:
    """The kills; asserts that every run ended as if nothing had happened."""
    result = subprocess.run(
        [sys.executable, str(KILLER), str(model_folder), str(work), "0", *wanted],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    ends = [report for report in reports if "differs" in report]
    assert ends and [report for report in ends if report["differs"]] == []
    return [report for report in reports if "kind" in report]


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bits(model_folder, tmp_path):
    """Fails if any state of a run is neither in its checkpoint nor computed again, or if a file is left half written."""
    killed = kills(model_folder, tmp_path, "logra=3", "adamw=1")
    assert [report["method"] for report in killed] == ["logra"] * 3 + ["adamw"]


@pytest.mark.kill
@pytest.mark.timeout(3600)
def test_fifty_kills(model_folder, tmp_path):
    killed = kills(model_folder, tmp_path, "logra=50", "adamw=6", "lora=6")
    assert len(killed) == 62
    assert {report["kind"] for report in killed} == PHASES
    counts = {phase: sum(report["kind"] == phase for report in killed) for phase in sorted(PHASES)}
    print(f"\n{len(killed)} kills, every run identical: {counts}")
