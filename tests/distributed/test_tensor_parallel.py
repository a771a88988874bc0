"""Tensor parallelism: the step of one process."""

import pytest
import torch.distributed as dist
from sharded_lm import Model, assert_close_to_one_process, assert_equal_on_all, batch, train
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import logra

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

STYLES = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "o_proj": RowwiseParallel}
TRUST = {"trust": logra.TrustRegion(kl_budget=1e-4, min_responses=8, alpha_max=100.0, method="difference")}
CASES = {"two_sided": {}, "scaled": {"input_scaling": True, "direction": "factored"}, "trust": TRUST}


def tensor_parallel(model, mesh):
    for layer in model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in STYLES.items()})
    return model


def tensor_parallel_alone(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    results = {}
    for name, settings in CASES.items():
        results[name] = train(tensor_parallel(Model(), mesh), batch(), **settings)
        results[name]["sketches"] = {}  # of blocks here; the updates that follow from them are compared
    return results


def test_tensor_parallelism_equals_one_process(workers, tmp_path):
    results = workers.run(tensor_parallel_alone, 2, tmp_path)
    for name, settings in CASES.items():
        assert_equal_on_all([result[name] for result in results])
        assert_close_to_one_process([result[name] for result in results], **settings)
