"""Meshes of two dimensions, 2 x 2: HSDP (replicas of shards), and FSDP2 over tensor parallelism."""

import pytest
import torch.distributed as dist
from sharded_lm import (
    Model,
    assert_close_to_one_process,
    assert_equal_on_all,
    batch,
    own_part,
    sharded,
    train,
    with_trust,
)
from test_tensor_parallel import CASES as TENSOR_PARALLEL_CASES
from test_tensor_parallel import tensor_parallel

import logra

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

HSDP_CASES = {"scaled": {"input_scaling": True, "direction": "factored"}, "trust": {"trust": True}}


def rows_held(model):
    return {name: len(logra.shards.local(weight)) for name, weight in model.named_parameters()}


def under_hsdp(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = {}
    for name, settings in HSDP_CASES.items():
        model = sharded(Model(), mesh=mesh)
        held = rows_held(model)
        results[name] = train(model, own_part(batch(), rank), **with_trust(settings)) | {"held": held}
        logra.distributed.average_(list(results[name]["sketches"].values()))
    return results


def test_hsdp_equals_one_process(workers, tmp_path):
    """Fails if the copies of a shard count twice in norms, or if sketches are averaged over one dimension only."""
    results = workers.run(under_hsdp, 4, tmp_path)
    assert [result["trust"]["held"]["layers.0.o_proj.weight"] for result in results] == [2, 1, 2, 1]
    for name, settings in HSDP_CASES.items():
        assert_equal_on_all([result[name] for result in results])
        assert_close_to_one_process([result[name] for result in results], **with_trust(settings))


def under_fsdp_and_tensor_parallelism(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    results = {}
    for name, settings in TENSOR_PARALLEL_CASES.items():
        model = sharded(tensor_parallel(Model(), mesh["tensor"]), mesh=mesh["shard"])
        held = rows_held(model)
        ids = batch().chunk(2)[mesh["shard"].get_local_rank()]
        results[name] = train(model, ids, **settings) | {"held": held}
        results[name]["sketches"] = {}  # of blocks here; the updates that follow from them are compared
    return results


def test_fsdp_over_tensor_parallelism_equals_one_process(workers, tmp_path):
    """Fails if rows that both split are taken in the wrong order, or data-parallel replicas are counted as four."""
    results = workers.run(under_fsdp_and_tensor_parallelism, 4, tmp_path)
    # Column-wise: 13 of 26 rows for tensor parallelism, and these in two parts. Row-wise: the rows are FSDP2's alone.
    assert [result["trust"]["held"]["layers.0.q_proj.weight"] for result in results] == [7, 7, 6, 6]
    assert [result["trust"]["held"]["layers.0.o_proj.weight"] for result in results] == [2, 2, 1, 1]
    for name, settings in TENSOR_PARALLEL_CASES.items():
        assert_equal_on_all([result[name] for result in results])
        assert_close_to_one_process([result[name] for result in results], **settings)
