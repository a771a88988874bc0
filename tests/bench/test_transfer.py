"""Bytes of a step, from formulas; and an update of other shapes that compresses as a real one does."""

import math

import pytest
import torch
import zstandard

from logra.bench import sync
from logra.bench.harness.results import Record, Results
from logra.bench.transfer import alternatives
from logra.bench.transfer.resample import QWEN_7B, SMOLLM2, Architecture, resampled
from logra.sync import BaseModel, DirectoryLog, Manifest
from logra.update import PolicyUpdate, round_factors

TINY = Architecture(name="tiny", num_weights=0, num_layers=2, hidden=24, intermediate=40, kv_width=8)


def update_of(architecture: Architecture, rank: int, version: int = 1) -> PolicyUpdate:
    """An update with the names and shapes of a model, from random factors whose rows differ in size."""
    generator = torch.Generator().manual_seed(version)
    weights = {}
    for layer in range(architecture.num_layers):
        for kind, (num_out, num_in) in architecture.shapes().items():
            out_factor = torch.randn(num_out, rank, generator=generator) * torch.rand(num_out, 1, generator=generator)
            in_factor = torch.randn(rank, num_in, generator=generator) * 0.01
            weights[f"model.layers.{layer}.{kind}"] = round_factors(
                out_factor, in_factor, factor_bits=4, key=layer * 100 + version
            )
    return PolicyUpdate(version - 1, version, 0, version - 1, weights, run_id="r")


def test_a_sparse_delta_holds_what_changes():
    # Catches a delta of fp32 differences, gaps that lose an index, and planes that mix up bytes.
    before = {"w": torch.randn(40, 30, generator=torch.Generator().manual_seed(0))}
    after = {"w": before["w"].clone()}
    changed = torch.tensor([5, 6, 700, 1199])
    after["w"].view(-1)[changed] *= 1.5
    after["w"].view(-1)[8] *= 1 + 2**-20  # no change in bf16
    num_bytes, num_changed = alternatives.sparse_delta(before, after)
    assert num_changed == 4
    planes = [bytes([5, 1, 182, 243, 0, 0, 2, 1] + [0] * 8)]  # gaps 5, 1, 694, 499 as int32, byte by byte
    values = after["w"].view(-1)[changed].to(torch.bfloat16).view(torch.uint8).view(4, 2)
    planes.append(bytes([*values[:, 0].tolist(), *values[:, 1].tolist()]))
    assert num_bytes == sum(len(zstandard.ZstdCompressor(level=3).compress(plane)) for plane in planes)


def test_bytes_of_dense_ways():
    update = update_of(TINY, rank=3)
    widths = 2 * (4 * 24 + 2 * (8 + 24) + 3 * (24 + 40))
    assert alternatives.low_rank_bytes(update.weights.values()) == 2 * 3 * widths
    assert alternatives.full_bytes(10) == 20


@pytest.mark.parametrize(
    ("architecture", "others"),
    # Embedding (tied in SmolLM2, two matrices in Qwen), norms, and Qwen's biases of q, k and v: all other weights.
    [
        (SMOLLM2, 49152 * 576 + 61 * 576),
        (QWEN_7B, 2 * 152064 * 3584 + 57 * 3584 + 28 * (3584 + 2 * 512)),
    ],
)
def test_the_shapes_are_those_of_the_models(architecture, others):
    targets = architecture.num_layers * sum(math.prod(shape) for shape in architecture.shapes().values())
    assert targets + others == architecture.num_weights


def test_a_resampled_update_compresses_as_the_real_one():
    # Catches copies of rows that zstd finds, and integers or exponents of another distribution.
    real = update_of(Architecture(name="", num_weights=0, num_layers=2, hidden=256, intermediate=512, kv_width=64), 16)
    architecture = Architecture(name="", num_weights=0, num_layers=4, hidden=512, intermediate=1024, kv_width=128)
    scaled = resampled(real, architecture, 16)
    fresh = update_of(architecture, 16)
    assert {name: weight.shape for name, weight in scaled.weights.items()} == {
        name: weight.shape for name, weight in fresh.weights.items()
    }
    assert scaled.num_bytes == pytest.approx(fresh.num_bytes, rel=0.01)  # 0.1 % off; copies as they are: 19 %


def test_a_lower_rank_keeps_a_part_of_every_row():
    real = update_of(TINY, 6)
    name = "model.layers.1.mlp.down_proj.weight"
    weight = resampled(real, TINY, 4).weights[name]
    assert weight.rank == 4
    assert weight.factor_out is not None and real.weights[name].factor_out is not None
    rows = {tuple(sorted(row)) for row in real.weights[name].factor_out.abs().tolist()}
    for row in weight.factor_out.abs().tolist():
        assert any(not set(row) - set(other) for other in rows)


def test_a_cell_becomes_a_table(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    log = DirectoryLog(tmp_path / "updates")
    log.start(Manifest(run_id="r", seed=0, base=BaseModel()))
    for version in (1, 2):
        log.append(update_of(TINY, 6, version))
    small = sync.measure_step(log, model, tmp_path, TINY, num_repeats=1)
    assert small["packet_bytes"] == (tmp_path / "updates" / "000000000002.update").stat().st_size
    assert 0 < small["changed_share"] <= 1
    assert all(small[name] > 0 for name in sync.OPERATIONS)
    large = sync.measure_shapes(log.read(2), TINY, num_repeats=1)
    assert list(large["by_rank_bytes"]) == ["6"]
    result = {"SmolLM2-135M": small | {"full_bytes": 10**9}, "Qwen2.5-7B": large | {"full_bytes": 10**9}}
    record = Record(
        cell={"seed": 0}, result=result, machine={}, commit=None, dirty=None, date=None, command="", jobs=1, wall_s=1.0
    )
    results = Results("sync", {}, [record])
    text = sync.table(results)
    assert f"{10**9 / small['packet_bytes']:.0f}x" in text
    assert f"{small['decode_apply_s'] / small['reload_s']:.2f}" in text
