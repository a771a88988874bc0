"""The formulas of growth, against the step that `logra plan` traces and the collectives that it calls."""

import json
import math

import pytest
import torch.distributed as dist

from logra import distributed
from logra.errors import ConfigError
from logra.planner.models import load_config
from logra.planner.options import PlanOptions
from logra.planner.scaling import Links, fan_out, held_bytes, model_shapes, reduction, update_bytes
from logra.planner.step import trace

SMALL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
RANK = 4


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return load_config(str(path))


def test_shapes(config):
    shapes = model_shapes(config)
    assert sorted(shapes.targets) == sorted(2 * [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)])
    assert sorted(shapes.others) == sorted([(64, 32), (64, 32), *5 * [(32,)]])
    assert shapes.num_parameters == 2 * 7680 + 2 * 2048 + 5 * 32
    assert shapes.factor_entries(in_=2) == 2 * (224 + 2 * 240)
    tied = model_shapes(type(config)(**(SMALL | {"tie_word_embeddings": True})))
    assert tied.others.count((64, 32)) == 1


# 3 does not divide the rows: the largest shard counts.
@pytest.mark.parametrize("num_gpus", [1, 3])
@pytest.mark.parametrize("method", ["adamw", "lora", "logra"])
def test_memory_is_that_of_the_traced_step(config, method, num_gpus):
    """Fails if a category has a wrong factor, or is sharded where the step keeps it whole."""
    options = PlanOptions(num_gpus=num_gpus, seq_len=16, rank=RANK, use_trust=False)
    report = trace(config, method, options)
    held = held_bytes(model_shapes(config), method, num_gpus, RANK)
    # Rotary frequencies, and a step count for each tensor of AdamW, which the formulas leave out.
    small = 4 * 4 * len(list(model_shapes(config).targets)) + 256
    # The momentum's input scales are counted for every target, and siblings share them.
    small += 2 * model_shapes(config).factor_entries(out=0) if method == "logra" else 0
    for category in ("weights", "non_target_parameters", "optimizer_state", "sync"):
        assert report.resident[category] == pytest.approx(held.get(category, 0), abs=small), category
        assert category != "weights" or report.resident[category] == held[category]
    if method == "adamw" and num_gpus == 1:
        assert report.phases["update"].at_peak["gradients"] == held["gradients"]


def test_what_is_sent_is_what_the_step_hands_to_collectives(config, monkeypatch):
    """Fails if sketches are counted per micro-batch or in another dtype, or if a broadcast is forgotten."""
    num_gpus, shapes = 4, model_shapes(config)
    sent = {"sketches": 0, "factors": 0, "integers": 0, "dense": 0, "moments": 0}
    average, broadcast, scatter = distributed._average_bucket, dist.broadcast, dist.reduce_scatter_single
    total = distributed.sum_

    def count_sketches(bucket, owner):
        sent["sketches"] += sum(4 * tensor.numel() for tensor, _ in bucket)
        return average(bucket, owner)

    def count_broadcasts(tensor, **options):
        if tensor.dim() > 0:  # no norm
            sent["integers" if tensor.element_size() == 1 else "factors"] += tensor.numel() * tensor.element_size()
        return broadcast(tensor, **options)

    def count_dense(output, input, **options):
        sent["dense"] += input.numel() * input.element_size()
        return scatter(output=output, input=input, **options)

    def count_moments(tensor):
        if tensor.numel() > len(shapes.targets):  # no norms
            sent["moments"] += 2 * tensor.numel() * tensor.element_size()  # an all-reduce is two rounds of a ring
        return total(tensor)

    monkeypatch.setattr(distributed, "_average_bucket", count_sketches)
    monkeypatch.setattr(distributed, "sum_", count_moments)
    monkeypatch.setattr(dist, "broadcast", count_broadcasts)
    monkeypatch.setattr(dist, "reduce_scatter_single", count_dense)
    options = PlanOptions(num_gpus=num_gpus, seq_len=16, rank=RANK)
    trace(config, "logra", options)
    num_traced, num_priced = 2, 1
    expected = reduction(shapes, "logra", num_gpus, RANK, 1, Links()).sent_bytes
    assert sent["dense"] == 0
    handed = sent["factors"] / num_priced + (sent["sketches"] + sent["integers"] + sent["moments"]) / num_traced
    assert 3 / 4 * handed == expected
    trace(config, "adamw", options)
    assert 3 / 4 * sent["dense"] / num_traced == reduction(shapes, "adamw", num_gpus, RANK, 1, Links()).sent_bytes


def test_seconds_of_a_reduction(config):
    shapes = model_shapes(config)
    links = Links(gpus_per_node=2, inside_gb_per_s=100.0, between_gb_per_s=10.0, hop_us=1.0)
    adapters = RANK * 928
    inside = reduction(shapes, "lora", 2, RANK, 3, links)
    assert inside.sent_bytes == 3 * 2 * adapters / 2
    assert inside.seconds == pytest.approx(inside.sent_bytes / 100e9 + 3 * 3 * 1e-6)
    between = reduction(shapes, "lora", 4, RANK, 3, links)
    assert between.seconds == pytest.approx(between.sent_bytes / 10e9 + 3 * 3 * 2 * 1e-6)
    alone = reduction(shapes, "logra", 1, RANK, 3, links)
    assert (alone.sent_bytes, alone.seconds) == (0, 0)


def test_bytes_and_seconds_of_an_update(config):
    shapes = model_shapes(config)
    assert update_bytes(shapes, "adamw", RANK, 3.3) == 2 * shapes.num_parameters
    assert update_bytes(shapes, "lora", RANK, 3.3) == 2 * RANK * 928
    assert update_bytes(shapes, "logra", RANK, 3.3) == pytest.approx(RANK * 928 * 3.3 / 8)
    in_turn, broadcast = fan_out(1e9, 4, Links(rollout_gb_per_s=2.0, hop_us=1000.0))
    assert (in_turn, broadcast) == (pytest.approx(2.004), pytest.approx(0.504))


def test_bad_links_and_models_are_named(tmp_path):
    for value in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="hop_us="):
            Links(hop_us=value)
    path = tmp_path / "config.json"
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 16,
    }
    path.write_text(json.dumps({"model_type": "gpt_neox", **sizes}))
    with pytest.raises(ConfigError, match="a gpt_neox model has none of q_proj"):
        model_shapes(load_config(str(path)))
