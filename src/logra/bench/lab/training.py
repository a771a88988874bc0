"""Whole runs of `logra train` as cells of a benchmark, and the tables that compare them.

Every run gets the same problems in the same order, sampling seeds and loss; a run's flags say what differs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from logra.bench.harness import Results, markdown_table, spread
from logra.errors import ConfigError
from logra.rl.baselines import LoraConfig

CURVES = ("reward/mean", "policy/entropy", "trust/predicted_kl", "trust/realised_kl", "trust/alpha", "trust/budget",
          "optim/update_ratio", "sync/bytes", "time/rollout_s", "time/update_s", "time/probe_s")  # fmt: skip
NUM_WEIGHTS, ADAPTED_WIDTH = 134_515_008, 305_280
"""Of SmolLM2-135M, which all runs train: its weights, and in + out summed over its linear layers but the head."""


def run(flags: Sequence[str], *, seed: int, model: Path | None = None) -> dict[str, Any]:
    """Train, and keep the results and the curves.

    Args:
        flags: of `logra train`.
        seed: of the run.
        model: folder of the model to start from; None is the default model.

    Returns:
        {"train": the command without its folders, "results": of results.json, "curves": {name: values by step},
        "unrelated_kl": exact KL(first policy || last policy) on unrelated text, nats per token}.
    """
    flags = [*flags, "--run.seed", str(seed)]
    start = [] if model is None else ["--model", str(model)]
    with trained(*flags, *start) as output:
        results = json.loads((output / "results.json").read_text())
        steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        kl = unrelated_kl(model, output / "model")
    curves = {key: [step.get(key) for step in steps] for key in CURVES if any(key in step for step in steps)}
    return {"train": " ".join(["logra train", *flags]), "results": results, "curves": curves, "unrelated_kl": kl}


@contextmanager
def trained(*flags: str) -> Iterator[Path]:
    """The folder of a run of `logra train` in a process of its own; gone afterwards.

    Args:
        flags: all but the folder and the number of threads, which is this process's.

    Raises:
        CalledProcessError: the run ended with another exit code than 0; it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="logra-bench-") as folder:
        output = Path(folder, "run")
        command = [sys.executable, "-m", "logra.cli.main", "train", "--output-dir", str(output), *flags]
        threads = ["--run.num-threads", os.environ.get("OMP_NUM_THREADS", "1")]
        subprocess.run([*command, *threads], check=True, stdout=subprocess.DEVNULL)
        yield output


def unrelated_kl(before: Path | None, after: Path) -> float:
    """Exact KL(before || after) on the texts that come with the diagnostics, nats per token.

    Args:
        before: folder of the first policy; None is the default model.
        after: folder of the last one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from logra.bench.lab.smollm2 import unrelated_text
    from logra.rl.default_model import default_model_path
    from logra.trust.measure import kl_since, probe_logits

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    folder = default_model_path() if before is None else before
    probe = unrelated_text(AutoTokenizer.from_pretrained(folder))
    logits = probe_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), probe)
    return kl_since(AutoModelForCausalLM.from_pretrained(after, dtype=torch.float32), probe, logits)


def table(results: Results, arms: Mapping[str, tuple[str, Sequence[str]]]) -> str:
    """Results over seeds, learning curves and scatter of the KL, of the arms that have run.

    Args:
        results: cells with an "arm".
        arms: name -> title, and flags.

    Raises:
        ConfigError: no cell has one of the arms.
    """
    present = results.values("arm")
    runs = {title: results.select(arm=arm) for arm, (title, _) in arms.items() if arm in present}
    if not runs:
        raise nothing_to_show(results)
    return "\n\n".join((summary(runs), curves(runs), kl_ratios(runs)))


def nothing_to_show(results: Results) -> ConfigError:
    """The error for results that hold no cell that their benchmark knows."""
    cells = ", ".join(str(record.cell) for record in results.records[:3]) or "none"
    return ConfigError(
        f"{results.benchmark}: there is nothing to show: the results hold no cell that it knows (cells: {cells}); run the "
        f"benchmark first"
    )


def summary(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Reward, held-out accuracy, disturbance, memory, synchronisation and time.

    Args:
        runs: by title, what `run` returned for every seed.
    """
    rows = []
    for title, cells in runs.items():
        results = [cell["results"] for cell in cells]
        before = statistics.fmean(result["heldout"]["before"] for result in results)
        disturbance = [cell["unrelated_kl"] for cell in cells if "unrelated_kl" in cell]
        rows.append(
            [
                title,
                str(len(cells)),
                spread([statistics.fmean(cell["curves"]["reward/mean"]) for cell in cells]),
                spread([result["mean_reward_last_3_steps"] for result in results]),
                f"{spread([result['heldout']['after'] for result in results])} ({before:.2f})",
                spread(disturbance, 3) if len(disturbance) == len(cells) else "-",
                spread(peaks) if (peaks := peaks_gib(cells)) else "-",
                f"{statistics.fmean(sent_bytes(cell) for cell in cells) / 1e6:.3g} MB",
                spread([seconds_per_rollout_second(cell) for cell in cells]),
            ]
        )
    header = ["method", "seeds", "reward, all steps", "last 3 steps", "held-out after (before)",
              "KL on unrelated text", "peak memory, GiB", "sent per update", "updates / rollouts, seconds"]  # fmt: skip
    return markdown_table(header, rows)


def peaks_gib(cells: Sequence[dict[str, Any]]) -> list[float]:
    """Peak memory of every run, GiB; empty where a run does not know its own.

    Args:
        cells: what `run` returned for every seed.
    """
    peaks = [cell["results"]["peak_memory_bytes"] for cell in cells]
    return [] if None in peaks else [peak / 2**30 for peak in peaks]


def sent_bytes(cell: dict[str, Any]) -> float:
    """What a replica needs of one update: the mean packet; of a baseline, which has none, its adapters or weights in bf16.

    Args:
        cell: what `run` returned.
    """
    if packets := [size for size in cell["curves"].get("sync/bytes", ()) if size]:  # 0: a step that was skipped
        return statistics.fmean(packets)
    words = cell["train"].split()
    if "lora" not in words:
        return 2 * NUM_WEIGHTS
    rank = int(words[words.index("--lora.rank") + 1]) if "--lora.rank" in words else LoraConfig().rank
    return 2 * rank * ADAPTED_WIDTH


def seconds_per_rollout_second(cell: dict[str, Any]) -> float:
    """Seconds of all updates (loss, gradients, optimizer, trust region) over those of the rollouts between them.

    The rollouts are about the same work for every method, so that the load of a shared machine falls out.
    """
    update, rollout = (sum(cell["curves"][f"time/{phase}_s"]) for phase in ("update", "rollout"))
    return update / rollout


def curves(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Mean reward over seeds of every three steps."""
    num_steps = max(len(cell["curves"]["reward/mean"]) for cells in runs.values() for cell in cells)
    rows = []
    for title, cells in runs.items():
        means = zip(*(by_three_steps(cell) for cell in cells), strict=True)
        rows.append([title, *(f"{statistics.fmean(values):.2f}" for values in means)])
    steps = [f"{start + 1}-{min(start + 3, num_steps)}" for start in range(0, num_steps, 3)]
    return markdown_table(["reward in steps", *steps], rows)


def by_three_steps(cell: dict[str, Any]) -> list[float]:
    """Mean rewards of steps 1 to 3, 4 to 6, and so on."""
    rewards = cell["curves"]["reward/mean"]
    return [statistics.fmean(rewards[start : start + 3]) for start in range(0, len(rewards), 3)]


def kl_ratios(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """How the realised KL of the steps scatters around the planned one, alpha² times the prediction."""
    rows = []
    for title, cells in runs.items():
        ratios = []
        for found in (cell["curves"] for cell in cells):
            columns = (found.get(f"trust/{name}", []) for name in ("realised_kl", "alpha", "predicted_kl"))
            for realised, alpha, predicted in zip(*columns, strict=True):
                if realised is not None and alpha and predicted:
                    ratios.append(realised / (alpha**2 * predicted))
        if ratios:
            deciles = statistics.quantiles(ratios, n=10, method="inclusive")
            shown = (min(ratios), deciles[0], statistics.median(ratios), deciles[-1], max(ratios))
            rows.append([title, str(len(ratios)), *(f"{value:.2f}" for value in shown)])
    return markdown_table(["realised / planned KL", "steps", "least", "10 %", "median", "90 %", "most"], rows)
