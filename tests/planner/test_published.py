"""The published case, 7B on four GPUs, stays what it was."""

import json
from pathlib import Path

import pytest

from logra.planner.plan import plan

BASELINE = json.loads(Path(__file__).parents[2].joinpath("benchmarks/baselines/plan_qwen2.5-7b.json").read_text())


@pytest.mark.parametrize(
    "method", ["adamw", *(pytest.param(m, marks=pytest.mark.plan) for m in ("logra", "paper", "lora"))]
)
def test_peak_and_composition_are_those_of_the_baseline(method):
    found = plan("qwen2.5-7b", methods=method, num_gpus=4, seq_len=2048, micro_batch=1, gpu_memory="80GB")["methods"][
        method
    ]
    expected = BASELINE["methods"][method]
    assert found["peak_phase"] == expected["peak_phase"]
    assert found["peak_bytes"] == pytest.approx(expected["peak_bytes"], rel=0.01)
    for kind in ("at_peak", "resident"):
        limit = 0.01 * sum(expected[kind].values())
        assert found[kind] == pytest.approx(expected[kind], abs=limit)


@pytest.mark.plan
def test_rank_64_with_24_bit_weights_stays_within_9_gib():
    settings = {"num_gpus": 4, "seq_len": 2048, "micro_batch": 1, "rank": 64, "weight_storage": "split24"}
    found = plan("qwen2.5-7b", methods="logra", **settings)["methods"]["logra"]
    assert found["peak_bytes"] <= 9 * 2**30
