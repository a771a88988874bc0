"""A step of many processes traced in one: torch's fake process group, fake tensors, no data."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import logra


class ScalarsAreOne(TorchDispatchMode):
    """Answers what a step asks of its data: every number that leaves a tensor is 1, every truth value True."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


@pytest.fixture
def eight_fake_processes():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"sketch": "one_sided", "direction": "row_adam", "momentum": 0.0}])
def test_a_step_of_eight_processes_is_traced_without_data(eight_fake_processes, settings):
    """Fails if a step asks for the data of another process, or uses an operation that fake tensors do not know."""
    mesh = dist.init_device_mesh("cpu", (8,))
    with FakeTensorMode(allow_non_fake_inputs=True), ScalarsAreOne():
        block = nn.Sequential(nn.Linear(32, 48), nn.Tanh())
        model = nn.Sequential(nn.Embedding(64, 32), block, nn.Linear(48, 64, bias=False))
        for module in (model[1], model):
            fully_shard(module, mesh=mesh)
        opt = logra.SketchOptimizer(model, target_modules=("1.0", "2"), rank=4, **settings)
        for _ in range(2):
            model(torch.zeros(2, 5, dtype=torch.int64)).float().logsumexp(-1).sum().backward()
            opt.step()
            opt.zero_grad()
    assert opt.version == 2
    assert opt.last_update.weights["1.0.weight"].shape == (48, 32)
    assert opt.targets[0].weight.shape == (6, 32)
