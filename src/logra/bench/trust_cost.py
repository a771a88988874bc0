"""Time of the trust region's prediction and check, as a share of a step.

Two cases on SmolLM2-135M: the default run of `logra train` (64 completions of at most 12 tokens), and an update from 64
completions of 256 tokens, whose rollout, many times as long as on a GPU, is left aside.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

import torch

from logra.bench.harness import Cell, Results, markdown_table, require_known
from logra.bench.lab.training import trained
from logra.errors import ConfigError

CASES = {
    "default": "default run: 64 completions of at most 12 tokens, whole step",
    "long": "64 completions of 256 tokens, step without the rollout",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    cases: tuple[str, ...] = tuple(CASES)
    """Cases."""
    num_steps: int = 5
    """Steps of the default run, at least 2; the first is left out of the mean."""

    def __post_init__(self) -> None:
        require_known("cases", self.cases, CASES)
        if self.num_steps < 2:
            raise ConfigError(f"num_steps={self.num_steps}: at least 2")


def cells(options: Options) -> list[Cell]:
    """One a case."""
    return [{"case": case} for case in options.cases]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Seconds of prediction and check, and of the step they belong to."""
    return _default_run(options.num_steps) if cell["case"] == "default" else _long_update()


def _default_run(num_steps: int) -> dict[str, Any]:
    with trained("--num-heldout", "0", "--run.num-steps", str(num_steps)) as run:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][1:]
    return {
        "probe_s": [step["time/probe_s"] for step in steps],
        "step_s": [step["time/rollout_s"] + step["time/update_s"] for step in steps],
    }


def _long_update() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from logra.bench.lab.loop import backward
    from logra.bench.lab.sampling import Rollout
    from logra.optim import Config, SketchOptimizer
    from logra.rl.default_model import default_model_path
    from logra.rl.probe_window import TimedTrust
    from logra.trust import TrustRegion

    model: Any = AutoModelForCausalLM.from_pretrained(str(default_model_path()), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (8, 36), generator=generator).repeat_interleave(8, dim=0)
    completions = torch.randint(100, 40_000, (64, 256), generator=generator)
    ids = torch.cat([prompts, completions], dim=1)
    rewards = torch.randint(0, 2, (64,), generator=generator).float()
    rollout = Rollout(ids, torch.ones_like(ids), torch.ones_like(completions), rewards, 8)
    trust = TimedTrust(TrustRegion(kl_budget=0.03))
    optimizer = SketchOptimizer(model, Config(lr=1e-4, trust=trust))
    start = time.perf_counter()
    backward(model, rollout, temperature=1.0, micro_batch=4)
    optimizer.set_probe(**rollout.probe(1.0))
    optimizer.step()
    return {"probe_s": [trust.seconds], "step_s": [time.perf_counter() - start]}


def table(results: Results) -> str:
    """Share of each case."""
    rows = []
    for case, title in CASES.items():
        for result in results.select(case=case):
            probe, step = result["probe_s"], result["step_s"]
            shares = [100 * own / whole for own, whole in zip(probe, step, strict=True)]
            spread = f" ({min(shares):.0f}-{max(shares):.0f})" if len(shares) > 1 else ""
            seconds = f"{sum(probe) / len(probe):.1f} of {sum(step) / len(step):.1f}"
            rows.append([title, str(len(shares)), f"{100 * sum(probe) / sum(step):.1f} %{spread}", seconds])
    return markdown_table(["case", "steps", "prediction and check", "seconds a step"], rows)
