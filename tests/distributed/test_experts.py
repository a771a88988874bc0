"""Experts on data-parallel replicas: what a token of any process reached moves on all of them."""

import pytest
import torch
from tiny_moe import make_model
from torch.nn import functional as F

import logra
from logra.errors import TargetError

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]


def step(ids):
    model = make_model(num_hidden_layers=1)
    opt = logra.SketchOptimizer(model, lr=1e-2, rank=4, target_modules=("gate_up_proj", "down_proj"))
    F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    reached = {fqn for fqn, sketch in opt._capture.sketches().items() if sketch.tensors()}
    opt.step()
    return reached, opt.last_update


def replicated(rank):
    from torch.distributed.fsdp import fully_shard

    ids = torch.randint(0, 64, (2, 3), generator=torch.Generator().manual_seed(4))
    reached, update = step(ids[rank : rank + 1])
    model = make_model(num_hidden_layers=1)
    fully_shard(model)
    try:
        logra.SketchOptimizer(model, lr=1e-2, target_modules=("down_proj",))
    except TargetError as error:
        refusal = str(error)
    return {"reached": reached, "packet": update.to_bytes(), "refusal": refusal}


def test_experts_reached_on_one_process_move_on_both(workers, tmp_path):
    first, second = workers.run(replicated, 2, tmp_path)
    assert first["packet"] == second["packet"]
    assert first["reached"] != second["reached"]
    moved = logra.update.PolicyUpdate.from_bytes(first["packet"]).weights
    assert set(moved) == first["reached"] | second["reached"]
    assert len(moved) < 16
    ids = torch.randint(0, 64, (2, 3), generator=torch.Generator().manual_seed(4))
    _, reference = step(ids)
    for fqn, update in moved.items():
        same = torch.isclose(update.dense(), reference.weights[fqn].dense(), rtol=1e-6, atol=0)
        assert same.float().mean() > 0.9, fqn
    assert "spread over processes" in first["refusal"]
