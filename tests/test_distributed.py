"""Two processes on half the data each: the same sketches as one process on all of it, the same bits on both.

Each process prices the step on its own probe; without the mean over processes they would scale it differently.
"""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import logra

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


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
        opt.set_probe(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=all_ones_but_first(ids))
        opt.step()
        skips.append(opt.last_skip)
    return [parameter.detach() for parameter in model.parameters()], first, skips


def all_ones_but_first(ids):
    return torch.ones_like(ids).index_fill(1, torch.tensor(0), 0)


def equal_halves(rank, directory):
    model, ids = model_and_ids()
    weights, first, skips = run_steps(model, ids[rank * 4 : rank * 4 + 4], poison_step=1 if rank == 1 else None)
    logra.distributed.average_(first)
    torch.save({"weights": weights, "first": first, "skips": skips}, f"{directory}/{rank}.pt")


def one_idle_process(rank, directory):
    """Rank 1 has no token and no probe, and only one of its targets runs."""
    model, ids = model_and_ids()
    opt = logra.SketchOptimizer(
        model, lr=0.02, rank=6, target_modules="all-linear", trust=logra.TrustRegion(kl_budget=1e-4)
    )
    if rank == 0:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        opt.set_probe(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=all_ones_but_first(ids))
    else:
        (0.0 * model[1](model[0](ids)).sum()).backward()
    opt.step()
    torch.save({"weights": [p.detach() for p in model.parameters()], "kl": opt.diagnostics()}, f"{directory}/{rank}.pt")


def nothing_ran_anywhere(rank, directory):
    model, _ = model_and_ids()
    opt = logra.SketchOptimizer(model, target_modules="all-linear")
    try:
        opt.step()
    except logra.LograError as error:
        torch.save(str(error), f"{directory}/{rank}.pt")


def under_ddp(rank, directory):
    model, ids = model_and_ids()
    opt = logra.SketchOptimizer(model, lr=0.02, rank=6, target_modules=("1", "3"), non_target="adamw")
    wrapped = nn.parallel.DistributedDataParallel(model)
    half = ids[rank * 4 : rank * 4 + 4]
    for _ in range(2):
        F.cross_entropy(wrapped(half).flatten(0, 1), half.flatten()).backward()
        opt.step()
        opt.zero_grad()
    bucketed = sum(parameter.numel() for parameter in wrapped._module_parameters)
    torch.save({"weights": [p.detach() for p in model.parameters()], "bucketed": bucketed}, f"{directory}/{rank}.pt")


def worker(rank, port, task, directory):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    task(rank, directory)
    dist.destroy_process_group()


def run_on_two(task, directory):
    """What both processes saved; fails if one of them is left waiting."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, task, str(directory)), nprocs=2)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def test_two_processes_equal_one_and_skip_together(tmp_path):
    results = run_on_two(equal_halves, tmp_path)
    model, ids = model_and_ids()
    _, first, _ = run_steps(model, ids)
    for reduced, whole in zip(results[0]["first"], first, strict=True):
        torch.testing.assert_close(reduced, whole, rtol=0, atol=2e-6 * whole.abs().max().item())
    # NaN on one process skips the step on both; without the reduction rank 0 would go on alone.
    assert results[0]["skips"] == results[1]["skips"] == [None, "non_finite_gradient", None]
    assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))


def test_a_process_without_tokens_takes_the_same_step(tmp_path):
    """Fails (or hangs) if a rank reduces only the sketches that it has itself, or prices the step alone."""
    results = run_on_two(one_idle_process, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))
    assert results[0]["kl"] == results[1]["kl"]
    assert 0 < results[0]["kl"]["realised_kl"] < 1.5e-4
    untouched, _ = model_and_ids()
    assert not torch.equal(results[1]["weights"][2], untouched[3].weight)


def test_errors_are_raised_on_all_processes(tmp_path):
    messages = run_on_two(nothing_ran_anywhere, tmp_path)
    assert messages[0] == messages[1]
    assert "no gradient was captured" in messages[0]


def test_ddp_holds_no_buckets_for_the_targets(tmp_path):
    """Without the ignore list DDP allocates every target's gradient, and misses it at the second step."""
    results = run_on_two(under_ddp, tmp_path)
    model, _ = model_and_ids()
    assert results[0]["bucketed"] == model[0].weight.numel()
    assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))
