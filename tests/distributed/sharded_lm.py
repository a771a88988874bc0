"""A small language model, the ways to spread it over processes, and a training loop whose results the tests compare."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import logra

VOCAB = 23
SETTINGS = {"lr": 0.02, "rank": 6, "target_modules": ("q_proj", "k_proj", "o_proj"), "momentum": 0.5}


class Block(nn.Module):
    """Two siblings and a projection. With three rows, o_proj is spread unevenly and leaves some processes empty-handed."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(16, 26, bias=True)
        self.k_proj = nn.Linear(16, 26, bias=False)
        self.o_proj = nn.Linear(26, 3, bias=False)
        self.back = nn.Linear(3, 16, bias=False)

    def forward(self, x):
        return x + self.back(torch.tanh(self.o_proj(torch.tanh(self.q_proj(x)) * torch.sigmoid(self.k_proj(x)))))


class Model(nn.Module):
    """[batch, tokens] -> logits [batch, tokens, VOCAB]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def sharded(model, mesh=None, **kwargs):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def batch():
    return torch.randint(0, VOCAB, (8, 9), generator=torch.Generator().manual_seed(1))


def loss_of(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def own_part(ids, rank):
    return ids.chunk(dist.get_world_size())[rank] if dist.is_initialized() else ids


def probe(ids):
    generated = torch.ones_like(ids)
    generated[:, 0] = 0
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": generated}


def train(model, ids, *, num_steps=3, micro_batches=2, with_probe=True, **settings):
    """Trains and returns what the tests compare: the sketches of the first step, updates, weights, diagnostics."""
    opt = logra.SketchOptimizer(model, **(SETTINGS | settings))
    sketches, updates, diagnostics = {}, [], []
    for step in range(num_steps):
        for micro in ids.chunk(micro_batches):
            (loss_of(model, micro) / micro_batches).backward()
        if step == 0:
            sketches = {
                f"{fqn}.{index}": tensor.clone()
                for fqn, sketch in opt._capture.sketches().items()
                for index, tensor in enumerate(sketch.tensors())
            }
        dense = [target.fqn for target in opt.targets if target.parameter.grad is not None]
        assert not dense
        if opt.config.trust is not None:
            opt.set_probe(**probe(ids))
        opt.step()
        opt.zero_grad()
        updates.append({fqn: update.dense() for fqn, update in opt.last_update.weights.items()})
        diagnostics.append(opt.diagnostics())
    weights = {name: logra.shards.whole(value) for name, value in model.state_dict().items()}
    return {"sketches": sketches, "updates": updates, "weights": weights, "diagnostics": diagnostics}


def with_trust(settings):
    if not settings.get("trust"):
        return settings
    # All responses, so that the mean over processes is the mean over the batch.
    return settings | {"trust": logra.TrustRegion(kl_budget=1e-4, min_responses=8, alpha_max=100.0)}


def assert_equal_on_all(results):
    for other in results[1:]:
        for name, weight in results[0]["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name
        for mine, theirs in zip(results[0]["updates"], other["updates"], strict=True):
            for fqn in mine:
                assert torch.equal(mine[fqn], theirs[fqn]), fqn
        assert results[0]["diagnostics"] == other["diagnostics"]


def assert_close_to_one_process(results, **settings):
    """Sketches within the error of summing fp32 in another order; updates equal but for close calls of the rounding."""
    one = train(Model(), batch(), **settings)
    for name in results[0]["sketches"]:
        sketch = one["sketches"][name]
        assert torch.allclose(results[0]["sketches"][name], sketch, rtol=0, atol=2e-6 * sketch.abs().max().item()), name
    for fqn, reference in one["updates"][0].items():
        same = torch.isclose(results[0]["updates"][0][fqn], reference, rtol=1e-6, atol=0)
        assert same.float().mean() > 0.9, (fqn, same.float().mean())
    for mine, reference in zip(results[0]["diagnostics"], one["diagnostics"], strict=True):
        assert mine == pytest.approx(reference, rel=2e-2)
    for name, weight in one["weights"].items():
        moved = (weight - Model().state_dict()[name]).norm()
        assert (results[0]["weights"][name] - weight).norm() <= 0.05 * moved, name
