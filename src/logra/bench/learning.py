"""Learning curves of every method on the default run of `logra train`: same problems, order, sampling seeds and loss.

A cell is one whole run of one method with one seed. Seconds depend on the machine and on what else runs: compare them
within one file only.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logra.bench.harness import Cell, Results, markdown_table, require_known, spread
from logra.bench.harness.figures import plot_runs, svg

BUDGET = ("--trust.kl-budget", "0.03", "--trust.kl-budget-final", "0.01", "--trust.schedule-steps", "15")
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logra": ("`logra` (two-sided, spectral, momentum 0.9, rank 16)", ("--method", "logra")),
    "logra-r32": ("`logra`, rank 32", ("--method", "logra", "--logra.rank", "32")),
    "logra-r14": ("`logra`, rank 14", ("--method", "logra", "--logra.rank", "14")),
    "adamw": ("dense AdamW, lr 3e-5", ("--method", "adamw")),
    "lora": ("LoRA, all linear, rank 16, lr 3e-4", ("--method", "lora")),
    "galore": ("GaLore, rank 64, lr 3e-4", ("--method", "galore")),
    "apollo": ("APOLLO, rank 64, lr 1e-4", ("--method", "apollo")),
    "paper": ("`paper` (one-sided row_adam, rank 256, budget 2e-4)", ("--method", "paper")),
    "paper-budget": ("`paper` at the KL budget of `logra`", ("--method", "paper", *BUDGET)),
}
"""Name of an arm: its title in tables, and its flags."""
_COLOURS = {"logra": "#0072B2", "adamw": "#D55E00", "lora": "#009E73", "galore": "#CC79A7", "apollo": "#E69F00",
            "paper": "#56B4E9"}  # fmt: skip
"""Arms of the figure."""
CURVES = ("reward/mean", "policy/entropy", "trust/predicted_kl", "trust/realised_kl", "trust/alpha", "trust/budget",
          "optim/update_ratio", "sync/bytes", "time/rollout_s", "time/update_s", "time/probe_s")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs."""
    arms: tuple[str, ...] = ("logra", "adamw", "lora", "paper")
    """Methods; galore and apollo need their packages (`make baselines`)."""

    def __post_init__(self) -> None:
        require_known("arms", self.arms, ARMS)


def cells(options: Options) -> list[Cell]:
    """Every method with one seed before the next seed."""
    return [{"arm": arm, "seed": seed} for seed in options.seeds for arm in options.arms]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Train, and keep the results and the curves."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    flags = [*ARMS[cell["arm"]][1], "--run.seed", str(cell["seed"]), "--run.num-threads", threads]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "logra.cli.main", "train", "--output-dir", f"{folder}/run", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = json.loads(Path(folder, "run", "results.json").read_text())
        steps = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    curves = {key: [step.get(key) for step in steps] for key in CURVES if any(key in step for step in steps)}
    return {"train": " ".join(["logra train", *flags]), "results": results, "curves": curves}


def table(results: Results) -> str:
    """Results over seeds, and the learning curves."""
    return "\n\n".join((_summary(results), _curves(results), _ratios(results)))


def figure(results: Results) -> str:
    """Mean reward of every three steps with the range over seeds, beside the peak memory of the processes, as SVG."""
    from matplotlib.figure import Figure

    drawn = {arm: _COLOURS[arm] for arm in _arms(results) if arm in _COLOURS}
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for arm, colour in drawn.items():
        title = ARMS[arm][0].partition(",")[0].partition(" (")[0].replace("`", "")
        runs = results.select(arm=arm)
        rewards = [_by_three_steps(result) for result in runs]
        steps = [3 * index + 2 for index in range(len(rewards[0]))]
        plot_runs(curves, steps, rewards, label=title, colour=colour, marker="o")
        peak_gib = max(result["results"]["peak_memory_bytes"] for result in runs) / 2**30
        bars.barh(title, peak_gib, color=colour)
        bars.annotate(f"{peak_gib:.2f}", (peak_gib, title), xytext=(3, 0), textcoords="offset points", va="center")
    curves.set(xlabel="step", ylabel="reward (share of right sums)", ylim=(0, 1))
    curves.legend(loc="upper left", fontsize="small", frameon=False)
    bars.set(xlabel="peak memory of the process, GiB")
    bars.margins(x=0.15)
    bars.invert_yaxis()
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return svg(figure)


def _summary(results: Results) -> str:
    rows = []
    for arm in _arms(results):
        runs = [result["results"] for result in results.select(arm=arm)]
        before = statistics.fmean(run["heldout"]["before"] for run in runs)
        rows.append(
            [
                ARMS[arm][0],
                str(len(runs)),
                spread([run["mean_reward_first_3_steps"] for run in runs]),
                spread([run["mean_reward_last_3_steps"] for run in runs]),
                f"{spread([run['heldout']['after'] for run in runs])} ({before:.2f})",
                spread([run["seconds_per_step"] for run in runs], 1),
                f"{max(run['peak_memory_bytes'] for run in runs) / 2**30:.2f} GiB",
            ]
        )
    header = "method", "seeds", "reward, first 3 steps", "last 3 steps", "held-out after (before)", "s / step"
    return markdown_table([*header, "peak memory"], rows)


def _curves(results: Results) -> str:
    """Mean reward over seeds of every three steps."""
    num_steps = max(len(result["curves"]["reward/mean"]) for result in results.select())
    rows = []
    for arm in _arms(results):
        runs = [_by_three_steps(result) for result in results.select(arm=arm)]
        rows.append([ARMS[arm][0], *(f"{statistics.fmean(means):.2f}" for means in zip(*runs, strict=True))])
    steps = [f"{start + 1}-{min(start + 3, num_steps)}" for start in range(0, num_steps, 3)]
    return markdown_table(["reward in steps", *steps], rows)


def _by_three_steps(result: dict[str, Any]) -> list[float]:
    """Mean rewards of steps 1 to 3, 4 to 6, and so on."""
    rewards = result["curves"]["reward/mean"]
    return [statistics.fmean(rewards[start : start + 3]) for start in range(0, len(rewards), 3)]


def _ratios(results: Results) -> str:
    """How the realised KL of the steps scatters around the planned one, alpha² times the prediction."""
    rows = []
    for arm in _arms(results):
        ratios = []
        for curves in (result["curves"] for result in results.select(arm=arm)):
            columns = (curves.get(f"trust/{name}", []) for name in ("realised_kl", "alpha", "predicted_kl"))
            for realised, alpha, predicted in zip(*columns, strict=True):
                if realised is not None and alpha and predicted:
                    ratios.append(realised / (alpha**2 * predicted))
        if ratios:
            deciles = statistics.quantiles(ratios, n=10, method="inclusive")
            shown = (min(ratios), deciles[0], statistics.median(ratios), deciles[-1], max(ratios))
            rows.append([ARMS[arm][0], str(len(ratios)), *(f"{value:.2f}" for value in shown)])
    return markdown_table(["realised / planned KL", "steps", "least", "10 %", "median", "90 %", "most"], rows)


def _arms(results: Results) -> list[str]:
    present = results.values("arm")
    return [arm for arm in ARMS if arm in present]
