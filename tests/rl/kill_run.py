"""Kills and resumes runs of `logra train`: a program of its own, so that no process with a test runner in it is forked.

    python kill_run.py MODEL_FOLDER WORK_FOLDER SEED METHOD=NUM_KILLS [METHOD=NUM_KILLS ...]

Of each method one run is left alone and counted: how often it passes each kind of point (see `instrument`). Others are killed
with SIGKILL at points drawn at random, a few times each, resumed with --resume auto after every kill, and compared with it.

Prints one JSON object for each kill, and one at the end of each run that was killed: what differed.
"""

import io
import json
import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from logra.checkpoint import store
from logra.optim import sketch_optimizer
from logra.rl import run_folder
from logra.rl.checkpoint_config import CheckpointConfig
from logra.rl.config import LoraConfig, LossConfig, RolloutConfig, RunConfig, TrainConfig
from logra.rl.grpo import CheckedGRPOTrainer
from logra.rl.run import train
from logra.sync import DirectoryLog, durable, publisher

NUM_STEPS, EVERY, KILLS_A_RUN = 6, 2, 4
TIMES = ("time/", "sync/seconds", "memory/")

TASK = """
import random

def dataset():
    return [{"prompt": f"{i} +", "answer": "a"} for i in range(5)]

def reward(completions, answer, **kwargs):
    # Draws from Python's generator, which nobody seeds at every step: only a checkpoint knows its state.
    return [sum(c.isalpha() for c in text) / 8 + random.random() / 8 for text in completions]
"""


class Points:
    """Counts the points that the process passes, and kills it at one of them."""

    def __init__(self, kind: str = "", number: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._target = (kind, number)

    def at(self, kind: str) -> bool:
        self.counts[kind] += 1
        return (kind, self.counts[kind]) == self._target

    def wrap(self, owner: Any, name: str, kind: str, half=None) -> None:
        """Two points for every call: before it (or half through it), and after it."""
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if self.at(kind):
                if half is not None:
                    half(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if self.at(kind):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, wrapped)


def half_a_line(path: Path, record: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record)[:20])


def half_a_file(tensors: Any, path: Path) -> None:
    path.write_bytes(b"half")


def half_a_packet(path: Path, data: bytes) -> None:
    path.write_bytes(data[: len(data) // 2])


def instrument(points: Points) -> None:
    """Put points into every phase of a step."""
    points.wrap(CheckedGRPOTrainer, "_generate_single_turn", "rollout")
    points.wrap(CheckedGRPOTrainer, "_calculate_rewards", "rollout")
    points.wrap(torch.Tensor, "backward", "backward")
    points.wrap(sketch_optimizer.merging, "merge", "update")
    points.wrap(torch.optim.AdamW, "step", "update")
    points.wrap(durable, "_write_all", "append", half_a_packet)
    points.wrap(durable, "sync_directory", "append")
    points.wrap(durable.os, "rename", "append")
    points.wrap(run_folder, "_append", "records", half_a_line)
    points.wrap(store, "save_file", "checkpoint", half_a_file)
    points.wrap(store, "fsync", "checkpoint")
    points.wrap(Path, "rename", "checkpoint")
    points.wrap(store.shutil, "rmtree", "checkpoint")


def run(config: TrainConfig, points: Points) -> None:
    publisher.new_run_id = lambda: "same"  # so that packets of two runs can be compared byte for byte
    instrument(points)
    output = io.StringIO()
    train(config, Console(file=output, width=200))


def fork(config: TrainConfig, points: Points) -> tuple[bool, dict[str, int]]:
    """Run in a child; whether it was killed, and the points it passed if it was not."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(config, points)
            os.write(write_end, json.dumps(points.counts).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    _, status = os.waitpid(child, 0)
    counts = os.read(read_end, 2**16)
    os.close(read_end)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"the run in {config.output_dir} failed")
    return os.WIFSIGNALED(status), json.loads(counts) if counts else {}


def finish(config: TrainConfig, *, anew: bool = False) -> dict[str, int]:
    """Run to the end; the points passed. A child that died by itself (libraries race for the environment) runs once more.

    Args:
        config: the run.
        anew: from the start every time, not from where it died.
    """
    for _ in range(3):
        if anew:
            shutil.rmtree(config.output_dir, ignore_errors=True)
        killed, counts = fork(config, Points())
        if not killed:
            return counts
    sys.exit(f"the run in {config.output_dir} died three times")


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, without times."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((folder / "results.json").read_text())
    log = []
    if (folder / "updates").exists():
        updates = DirectoryLog(folder / "updates")
        log = [updates.read_packet(version) for version in range(1, updates.latest() + 1)]
    weights = load_file(folder / "model" / "model.safetensors")
    return {
        "metrics": [{name: value for name, value in step.items() if not name.startswith(TIMES)} for step in steps],
        "samples": (folder / "samples.jsonl").read_bytes(),
        "weights": {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        "updates": log,
        "results": {
            name: results[name] for name in ("num_steps", "interrupted", "heldout", "mean_reward_last_3_steps")
        },
        "checkpoints": store.CheckpointStore(folder / "checkpoints").steps(),
        "leftovers": [str(path) for path in folder.rglob("*tmp*")],
    }


def config_of(method: str, model: str, folder: Path) -> TrainConfig:
    lora = {"lora": LoraConfig(rank=4, lr=0.05)} if method == "lora" else {}
    return TrainConfig(
        output_dir=str(folder),
        resume="auto",
        method=method,
        model=model,
        task=str(folder.parent / "task.py"),
        num_heldout=0,
        rollout=RolloutConfig(num_prompts=2, num_samples=4, max_new_tokens=4),
        loss=LossConfig(micro_batch_size=4),
        # Five rows, two a step: the run goes through several orders of the data.
        run=RunConfig(num_steps=NUM_STEPS, device="cpu", lr_schedule="cosine", warmup_steps=2),
        checkpoints=CheckpointConfig(every=EVERY, keep=2),
        **lora,
    )


def kill_runs(method: str, model: str, work: Path, num_kills: int, generator: random.Random) -> None:
    work.mkdir(parents=True, exist_ok=True)
    (work / "task.py").write_text(TASK)
    counts = finish(config_of(method, model, work / "alone"), anew=True)
    expected = outcome(work / "alone")
    kinds = sorted(counts)
    done, index = 0, 0
    while done < num_kills:
        folder, index = work / f"killed-{index}", index + 1
        for _ in range(min(KILLS_A_RUN, num_kills - done)):
            # Every kind in turn. The further a run is, the fewer points are left: it may end without being killed.
            kind = kinds[done % len(kinds)]
            point = {"kind": kind, "number": generator.randint(1, max(counts[kind] * 2 // 3, 1))}
            killed, _ = fork(config_of(method, model, folder), Points(**point))
            if not killed:
                break
            done += 1
            print(json.dumps({"method": method, "run": folder.name, **point}), flush=True)
        finish(config_of(method, model, folder))
        found = outcome(folder)
        differs = [key for key in expected if found[key] != expected[key]]
        print(json.dumps({"method": method, "run": folder.name, "differs": differs}), flush=True)


def main(model: str, work: Path, seed: int, wanted: dict[str, int]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for method, num_kills in wanted.items():
        kill_runs(method, model, work / method, num_kills, random.Random(seed))


if __name__ == "__main__":
    pairs = (argument.split("=") for argument in sys.argv[4:])
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), {method: int(number) for method, number in pairs})
