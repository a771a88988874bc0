"""Learning curves of every method on the default run of `logra train`: same problems, order, sampling seeds and loss.

    python benchmarks/default_run.py run [--seeds 0 1 2] [--jobs 2]     cells that are not there yet, one process a cell
    python benchmarks/default_run.py table                              the Markdown tables of README

A cell is one run of one method with one seed; its numbers are kept in results/default_run.json as soon as it ends, so an
interrupted benchmark goes on where it stopped. Seconds depend on the machine and on what else runs: compare them within
one file only.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "default_run.json"
BUDGET = ["--trust.kl-budget", "0.03", "--trust.kl-budget-final", "0.01", "--trust.schedule-steps", "15"]
ARMS: dict[str, tuple[str, list[str]]] = {
    "logra": ("`logra` (two-sided, spectral, momentum 0.9, rank 32)", ["--method", "logra"]),
    "adamw": ("dense AdamW, lr 3e-5", ["--method", "adamw"]),
    "lora": ("LoRA, all linear, rank 16, lr 3e-4", ["--method", "lora"]),
    "paper": ("`paper` (one-sided row_adam, rank 256, budget 2e-4)", ["--method", "paper"]),
    "paper-budget": ("`paper` at the KL budget of `logra`", ["--method", "paper", *BUDGET]),
}


def run_cell(arm: str, seed: int, num_threads: int) -> dict[str, Any]:
    """Train one cell and return its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*ARMS[arm][1], "--run.seed", str(seed), "--run.num-threads", str(num_threads)]
        command = [sys.executable, "-m", "logra.cli.main", "train", "--output-dir", f"{folder}/run", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = json.loads(Path(folder, "run", "results.json").read_text())
        steps = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    keys = ["reward/mean", "policy/entropy", "trust/predicted_kl", "trust/realised_kl", "trust/alpha", "trust/budget",
            "optim/update_ratio", "sync/bytes", "time/rollout_s", "time/update_s", "time/probe_s"]  # fmt: skip
    curves = {key: [step.get(key) for step in steps] for key in keys if any(key in step for step in steps)}
    return {
        "arm": arm,
        "seed": seed,
        "command": " ".join(["logra train", *flags]),
        "results": results,
        "curves": curves,
    }


def machine(num_threads: int, jobs: int) -> dict[str, Any]:
    """What the numbers depend on."""
    import torch
    import transformers
    import trl

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    return {
        "cpu": cpu,
        "threads": num_threads,
        "jobs": jobs,
        "commit": commit,
        "python": platform.python_version(),
    } | versions


def run(seeds: list[int], arms: list[str], jobs: int, num_threads: int) -> None:
    """Run the missing cells, `jobs` at a time."""
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"machine": machine(num_threads, jobs), "cells": []}
    have = {(cell["arm"], cell["seed"]) for cell in done["cells"]}
    todo = [(arm, seed) for seed in seeds for arm in arms if (arm, seed) not in have]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_cell, arm, seed, num_threads) for arm, seed in todo]
        for future in as_completed(futures):
            cell = future.result()
            done["cells"].append(cell)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(done, indent=1) + "\n")
            print(f"{cell['arm']} seed {cell['seed']}: {cell['results']['heldout']['after']}", flush=True)


def spread(values: list[float], digits: int = 2) -> str:
    """Mean and range over seeds."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table() -> str:
    """The Markdown table over all cells."""
    done = json.loads(RESULTS.read_text())
    lines = [
        "| method | seeds | reward, first 3 steps | last 3 steps | held-out after (before) | s / step | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, (title, _) in ARMS.items():
        results = [cell["results"] for cell in done["cells"] if cell["arm"] == arm]
        if not results:
            continue
        before = statistics.fmean([r["heldout"]["before"] for r in results])
        cells = [
            title,
            str(len(results)),
            spread([r["mean_reward_first_3_steps"] for r in results]),
            spread([r["mean_reward_last_3_steps"] for r in results]),
            f"{spread([r['heldout']['after'] for r in results])} ({before:.2f})",
            spread([r["seconds_per_step"] for r in results], 1),
            f"{max(r['peak_memory_bytes'] for r in results) / 2**30:.2f} GiB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curves() -> str:
    """The learning curves as a Markdown table: mean reward over seeds of every three steps."""
    cells = json.loads(RESULTS.read_text())["cells"]
    num_steps = max(len(cell["curves"]["reward/mean"]) for cell in cells)
    starts = range(0, num_steps, 3)
    lines = [
        "| reward in steps | " + " | ".join(f"{start + 1}-{min(start + 3, num_steps)}" for start in starts) + " |",
        "|---" * (len(starts) + 1) + "|",
    ]
    for arm, (title, _) in ARMS.items():
        rewards = [cell["curves"]["reward/mean"] for cell in cells if cell["arm"] == arm]
        if rewards:
            means = [statistics.fmean(x for run in rewards for x in run[start : start + 3]) for start in starts]
            lines.append(f"| {title} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="methods")
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at the same time")
    parser.add_argument("--num-threads", type=int, default=1, help="CPU threads of each")
    args = parser.parse_args()
    if args.action == "run":
        run(args.seeds, args.arms, args.jobs, args.num_threads)
    print(table(), curves(), sep="\n\n")


if __name__ == "__main__":
    main()
