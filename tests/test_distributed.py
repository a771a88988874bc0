"""Two processes on half the data each: the same sketches as one process on all of it, the same bits on both.

Each process prices the step on its own probe; without the mean over processes they would scale it differently.
"""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import logra

pytestmark = pytest.mark.distributed


def model_and_ids():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(23, 32), nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 23, bias=False))
    return model, torch.randint(0, 23, (8, 9))


def run_steps(model, ids, poison_step=None):
    opt = logra.SketchOptimizer(
        model, lr=0.02, rank=6, target_modules="all-linear", momentum=0.5, trust=logra.TrustRegion(kl_budget=1e-4)
    )
    skips, first = [], None
    for step in range(3):
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        if step == 0:
            first = [tensor.clone() for sketch in opt._capture.sketches().values() for tensor in sketch.tensors()]
        if step == poison_step:
            opt._capture.sketches()["1.weight"].on_in.fill_(float("nan"))
        opt.set_probe(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            loss_mask=torch.ones_like(ids).index_fill(1, torch.tensor(0), 0),
        )
        opt.step()
        skips.append(opt.last_skip)
    return [parameter.detach() for parameter in model.parameters()], first, skips


def worker(rank, port, directory):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, ids = model_and_ids()
    weights, first, skips = run_steps(model, ids[rank * 4 : rank * 4 + 4], poison_step=1 if rank == 1 else None)
    logra.distributed.average_(first)
    torch.save({"weights": weights, "first": first, "skips": skips}, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_processes_equal_one_and_skip_together(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model, ids = model_and_ids()
    _, first, _ = run_steps(model, ids)
    for reduced, whole in zip(results[0]["first"], first, strict=True):
        torch.testing.assert_close(reduced, whole, rtol=0, atol=2e-6 * whole.abs().max().item())
    # NaN on one process skips the step on both; without the reduction rank 0 would go on alone.
    assert results[0]["skips"] == results[1]["skips"] == [None, "non_finite_gradient", None]
    assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))
