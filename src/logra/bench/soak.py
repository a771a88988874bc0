"""A long run of a small policy with every guard on, without and with faults: does it hold, and stay as large and fast?

A cell is one run of `logra train`, in this process, so that its memory can be watched. Faults are a reward function that
returns NaN at random, one poisoned batch, ten times `lr` for 20 steps, and 20 steps that really are ten times as long.
"""

import json
import os
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, require_known, require_positive
from logra.errors import ConfigError

WARM_UP = 0.2
"""Share of the run before memory and time are expected to be flat."""
NUM_POINTS = 50
"""Points of the curves that are kept."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    faults: tuple[str, ...] = ("yes",)
    """yes: with faults; no: without."""
    num_steps: int = 5000
    """Optimizer steps."""
    warm_up_batches: int = 400
    """Batches of imitation before the run."""

    def __post_init__(self) -> None:
        require_known("faults", self.faults, ("yes", "no"))
        require_positive(self, "num_steps")
        if self.warm_up_batches < 0:
            raise ConfigError(f"warm_up_batches={self.warm_up_batches}: at least 0")


def cells(options: Options) -> list[Cell]:
    """With and without faults."""
    return [{"faults": faults} for faults in options.faults]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Train, and summarise what happened."""
    from logra.bench.soaking import task
    from logra.bench.soaking.policy import save_policy

    os.environ.pop(task.NUM_STEPS, None)
    if cell["faults"] == "yes":
        os.environ[task.NUM_STEPS] = str(options.num_steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(folder / "policy", num_steps=options.warm_up_batches)
        monitor, results = _train(folder, options, faults=cell["faults"] == "yes")
        steps = _read(folder / "run" / "metrics.jsonl")
        events = _read(folder / "run" / "events.jsonl")
        replica = _replica_agrees(folder)
    return _summary(monitor, results, steps, events) | {"replica_agrees": replica}


def soak_config(folder: Path, num_steps: int) -> Any:
    """The configuration of the run: every guard on.

    Args:
        folder: that holds the policy and gets the run.
        num_steps: optimizer steps.
    """
    import logra
    from logra.bench.soaking import policy, task
    from logra.rl import checkpoint_config, config
    from logra.rl.guards import config as guards

    def rule(threshold: float, action: Any) -> Any:
        return guards.Rule(threshold=threshold, action=action)

    sentinels = guards.Sentinels(
        entropy_floor=rule(0.003, "rollback"),
        reference_kl=rule(2.0, "warn"),
        realised_kl=rule(2.0, "rollback"),
        length_jump=rule(2.0, "skip"),
        truncation=rule(0.9, "skip"),
        repetition=rule(0.9, "skip"),
        effective_samples=rule(0.3, "skip"),
        reward_drop=rule(4.0, "rollback"),
        prediction_error=rule(10.0, "warn"),
        filtered=rule(0.999, "stop"),
        update_norm=rule(20.0, "rollback"),
    )
    return config.TrainConfig(
        output_dir=str(folder / "run"),
        model=str(folder / "policy"),
        task=str(task.__file__),
        num_heldout=128,
        rollout=config.RolloutConfig(num_prompts=4, num_samples=8, max_new_tokens=policy.MAX_ANSWER),
        loss=config.LossConfig(beta=1e-4, mask_truncated=True, micro_batch_size=32),
        run=config.RunConfig(num_steps=num_steps, num_logged_samples=1, anchor_every=250, device="cpu"),
        checkpoints=checkpoint_config.CheckpointConfig(every=250),
        logra=logra.Config(lr=1e-3, rank=8),
        trust=logra.TrustRegion(kl_budget=3e-4, kl_budget_final=1e-4, schedule_steps=2000, min_tokens=64),
        guards=guards.GuardsConfig(
            on_bad_reward="drop",
            resample=True,
            validate_every=250,
            length_penalty=guards.LengthPenalty(weight=0.05, cycle_steps=200, on_steps=100),
            reference=guards.ReferenceReset(
                every_steps=1000, kl_spike=1.0, stalled_validations=3, reset_optimizer=True
            ),
            sentinels=sentinels,
        ),
    )


def table(results: Results) -> str:
    """Figures of the runs, and what the guards did."""
    rows = []
    for faults in results.values("faults"):
        for run in results.select(faults=faults):
            memory, seconds = run["resident"], run["step_s"]
            actions = ", ".join(f"{count} {kind}" for kind, count in run["actions"].items()) or "none"
            rows.append(
                [
                    "with faults" if faults == "yes" else "without faults",
                    f"{run['num_steps']:,}",
                    f"{run['reward_first']:.2f} / {run['reward_last']:.2f} ({run['reward_lowest']:.2f})",
                    f"{run['heldout_before']:.2f} / {run['heldout_after']:.2f}",
                    f"{memory['after_warm_up_bytes'] / 2**20:.0f} / {memory['end_bytes'] / 2**20:.0f} MiB "
                    f"({memory['growth']:+.2%})",
                    f"{1000 * seconds['early']:.0f} / {1000 * seconds['late']:.0f} ms",
                    actions,
                ]
            )
    header = ["run", "steps", "reward, first / last 200 steps (lowest 200)", "held-out before / after",
              "resident after the first fifth / at the end", "median step, early / late, CPU time", "actions"]  # fmt: skip
    return markdown_table(header, rows)


def _train(folder: Path, options: Options, *, faults: bool) -> tuple[Any, dict[str, Any]]:
    from rich.console import Console

    from logra.bench.soaking.monitor import Faults, Monitor
    from logra.rl import methods
    from logra.rl.run import train

    monitor = Monitor(folder / "monitor.txt")
    build = methods.build_trainer

    def build_watched(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        trainer.add_callback(monitor)
        if faults:
            trainer.add_callback(Faults(trainer))
        return trainer

    methods.build_trainer = build_watched
    try:
        with (folder / "log.txt").open("w") as log:
            outcome = train(soak_config(folder, options.num_steps), Console(file=log, width=200))
    finally:
        methods.build_trainer = build
    return monitor, outcome.results


def _summary(
    monitor: Any, results: dict[str, Any], steps: list[dict[str, Any]], events: list[dict[str, Any]]
) -> dict[str, Any]:
    # A poisoned batch is no reward of the policy.
    rewards = [value for step in steps if (value := step.get("reward/mean")) is not None and value > -1]
    width = min(200, len(rewards))
    means = [statistics.fmean(rewards[start : start + width]) for start in range(0, len(rewards) - width + 1, width)]
    warm = int(WARM_UP * len(steps))
    after = monitor.resident_bytes[warm:]
    start, end = statistics.median(after[:100]), statistics.median(after[-100:])
    half = len(monitor.seconds) // 2
    stride = max(len(steps) // NUM_POINTS, 1)
    acted = Counter(f"{event['kind']}: {event['action']}" for event in events if event["action"] != "warn")
    return {
        "num_steps": len(steps),
        "reward_first": means[0],
        "reward_last": statistics.fmean(rewards[-width:]),
        "reward_lowest": min(means),
        "heldout_before": results["heldout"]["before"],
        "heldout_after": results["heldout"]["after"],
        "resident": {
            "after_warm_up_bytes": start,
            "end_bytes": end,
            "highest_bytes": max(after),
            "growth": end / start - 1,
        },
        "step_s": {
            "early": statistics.median(monitor.seconds[warm:half]),
            "late": statistics.median(monitor.seconds[half:]),
            "all": sum(monitor.seconds),
        },
        "guards": results["guards"],
        "actions": dict(sorted(acted.items())),
        "warnings": dict(sorted(Counter(event["kind"] for event in events if event["action"] == "warn").items())),
        "rollbacks": [event for event in events if event["kind"] == "rollback"],
        "curves": {
            name: [step.get(name) for step in steps[::stride]]
            for name in ("step", "reward/mean", "policy/entropy", "kl", "trust/realised_kl", "heldout/score")
        }
        | {"resident_bytes": monitor.resident_bytes[::stride]},
    }


def _replica_agrees(folder: Path) -> bool:
    """Whether a fresh replica that follows the log, rollbacks and all, ends at the saved model, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    from logra.sync import DirectoryLog, Replica

    start: Any = AutoModelForCausalLM.from_pretrained(folder / "policy")
    end: Any = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    replica = Replica(start, version=0)
    for update in DirectoryLog(folder / "run" / "updates").read_since(0):
        replica.apply(update)
    trained = dict(end.named_parameters())
    return all(torch.equal(value, trained[name]) for name, value in replica.weights().items())


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
