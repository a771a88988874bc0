"""The ratios that `make bench-check` compares: what each benchmark names, and that a loss of any fails the check."""

import dataclasses
from pathlib import Path

import pytest

from logra.bench.harness.benchmark import find, summaries
from logra.bench.harness.check import Ratio, read_baselines, write_baselines
from logra.bench.harness.results import Record, Results
from logra.cli import bench
from logra.cli.main import main

BASELINES = Path(__file__).parents[2] / "benchmarks" / "baselines"

MEASURED = {
    "sync": [
        (
            {"seed": 0},
            {
                "SmolLM2-135M": {
                    "full_bytes": 1200, "sparse_bytes": 60, "low_rank_bytes": 50, "packet_bytes": 10, "encode_s": 9.0
                },
                "Qwen2.5-7B": {"full_bytes": 8000, "low_rank_bytes": 40, "packet_bytes": 8},
            },
        )
    ],
    "memory": [
        ({"kind": "process", "method": method}, {"process_peak_bytes": peak})
        for method, peak in (("logra", 30), ("adamw", 120), ("lora", 40))
    ],
    "rollout": [
        (
            {"way": "shared", "shape": "default"},
            {"transformers_s": [900.0, 1.0], "transformers_cpu_s": [3.0, 5.0], "shared_s": [1.0, 800.0],
             "shared_cpu_s": [1.5, 2.0], "num_tokens": 768},
        )
    ],
}  # fmt: skip
RATIOS = {
    "sync": {
        "full weights over packet, SmolLM2-135M": Ratio(120.0, "higher"),
        "sparse delta over packet, SmolLM2-135M": Ratio(6.0, "higher"),
        "LoRA-sized factors over packet, SmolLM2-135M": Ratio(5.0, "higher"),
        "full weights over packet, Qwen2.5-7B": Ratio(1000.0, "higher"),
        "LoRA-sized factors over packet, Qwen2.5-7B": Ratio(5.0, "higher"),
    },
    "memory": {
        "logra against adamw, peak resident memory": Ratio(0.25, "lower"),
        "logra against lora, peak resident memory": Ratio(0.75, "lower"),
    },
    "rollout": {"shared prompts against transformers, default": Ratio(2.25, "higher")},
}


def results_of(name):
    records = [
        Record(cell=cell, result=result, machine={}, commit=None, dirty=None, date=None, command="", jobs=1, wall_s=0.0)
        for cell, result in MEASURED[name]
    ]
    return Results(name, {}, records)


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_are_those_of_the_numbers(name):
    """Fails for a ratio upside down, of the wrong pair, or of seconds that passed on a busy machine."""
    assert find(name).ratios(results_of(name)) == RATIOS[name]


@pytest.mark.parametrize(("name", "ratio"), [(name, ratio) for name, found in RATIOS.items() for ratio in found])
def test_a_loss_of_any_ratio_fails_the_check(name, ratio, monkeypatch, tmp_path, capsys):
    """The baseline says that the ratio was better by what makes the measured one 9 or 11 % worse."""
    monkeypatch.setattr(bench, "run", lambda *_, **__: results_of(name))
    path = tmp_path / f"{name}.json"
    for share_lost, code in ((0.09, 0), (0.11, 1)):
        kept = RATIOS[name][ratio]
        better = kept.value / (1 - share_lost if kept.better == "higher" else 1 + share_lost)
        write_baselines(path, RATIOS[name] | {ratio: dataclasses.replace(kept, value=better)})
        assert main(["bench", "check", name, "--baselines-dir", str(tmp_path)]) == code
    assert f"{name} {ratio}: " in capsys.readouterr().out.splitlines()[-1]


def test_every_benchmark_with_ratios_has_a_baseline_of_them():
    """Fails for a check that ends in an error for want of a file, or of a ratio under the name that it has now."""
    checked = {name for name in summaries() if find(name).ratios is not None}
    assert checked == {"speed", *RATIOS}
    for name in checked:
        baselines = read_baselines(BASELINES / f"{name}.json")
        assert baselines.keys() == RATIOS.get(name, baselines).keys()
