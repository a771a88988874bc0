"""The examples run as they stand, and do what they say."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mean(values):
    return math.fsum(values) / len(values)


def test_pytorch_loop_learns(capsys):
    rewards = load("pytorch_loop").main(["--steps", "20"])
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1
    assert capsys.readouterr().out.count("realised KL") == 20


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
def test_trl_grpo_learns():
    rewards = load("trl_grpo").main(["--steps", "20"])
    assert len(rewards) == 20
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1


def test_custom_task_is_a_usable_task():
    from logra.rl.tasks import load_task

    task = load_task(str(EXAMPLES / "custom_task.py"))
    assert len(task.train) >= 8
    completions = [[{"role": "assistant", "content": text}] for text in ("Green.", "It is green.", "red or blue", "?")]
    assert task.reward(completions, thing=["grass"] * 4) == pytest.approx([1.0, 0.8, 0.0, 0.0])


@pytest.mark.parametrize("name", ["trl_grpo", "pytorch_loop"])
def test_every_script_explains_itself(name):
    shown = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--help"], check=True, capture_output=True, text=True
    ).stdout
    assert f"python examples/{name}.py" in shown
