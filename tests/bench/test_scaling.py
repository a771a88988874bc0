"""The simulation of growth: its cells and its tables."""

import json

import pytest

from logra.bench import scaling
from logra.bench.harness.results import Record, Results
from logra.errors import ConfigError

SMALL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip


def test_a_model_from_cell_to_table(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    options = scaling.Options(models=(str(path),), max_gpus=5, max_replicas=2, rank=8, lora_rank=4)
    (cell,) = scaling.cells(options)
    result = scaling.run_cell(cell, options)
    assert list(result["gpus"]) == ["1", "2", "4"]
    assert list(result["replicas"]) == ["1", "2"]
    held = {method: sum(found["held_bytes"].values()) for method, found in result["gpus"]["4"].items()}
    # Adapters have the rank of LoRA: 4 · 928 entries, 16 bytes each, over 4 GPUs.
    frozen = 4 * result["num_parameters"] / 4
    assert held["adamw"] == pytest.approx(4 * frozen, rel=0.01)
    assert held["lora"] == pytest.approx(frozen + 4 * 928 * 16 / 4, rel=0.01)
    assert result["gpus"]["1"]["adamw"]["sent_bytes"] == 0
    serving = result["replicas"]["2"]["logra"]
    assert serving["in_turn_s"] > serving["broadcast_s"] > 0
    unknown = dict.fromkeys(("commit", "dirty", "date", "jobs", "wall_s"))
    record = Record(cell=cell, result=json.loads(json.dumps(result)), machine={}, command="", **unknown)
    text = scaling.table(Results("scaling", {}, [record]))
    lines = text.splitlines()
    assert lines[0].startswith(f"**{path}**")
    assert sum(line.startswith(("| 1 |", "| 2 |", "| 4 |")) for line in lines) == 5
    assert not any("e-" in line for line in lines if line.startswith("|"))


def test_numbers_that_make_no_sense_are_refused():
    for settings in ({"max_gpus": 0}, {"num_micro_batches": -1}, {"bits_per_integer": 0.0}, {"between_gb_per_s": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            scaling.Options(**settings)


def test_a_model_that_is_not_there_is_refused_before_any_cell():
    with pytest.raises(ConfigError, match="model='nope-7b': neither a preset"):
        scaling.Options(models=("qwen2.5-7b", "nope-7b"))
