"""`logra.memory.profile`: what model and optimizer hold between two operations."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import logra
from logra.errors import LograError
from logra.memory.categories import CATEGORIES


def backward(model, ids):
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


def test_a_sketched_model(tiny_lm, token_ids):
    opt = logra.SketchOptimizer(tiny_lm, rank=3, target_modules="all-linear")
    backward(tiny_lm, token_ids)
    found = logra.memory.profile(tiny_lm, opt)
    sizes = [(target.out_features, target.in_features) for target in opt.targets]
    assert set(found) == set(CATEGORIES)
    assert found["weights"] == 4 * sum(num_out * num_in for num_out, num_in in sizes)
    assert found["sketches"] == 4 * 3 * sum(num_out + 2 * num_in for num_out, num_in in sizes)
    assert found["gradients"] == found["optimizer_state"] == 0
    opt.step()
    found = logra.memory.profile(tiny_lm, opt)
    assert found["sketches"] == 0
    scales = 2 * 4 * sum(num_in for _, num_in in sizes)  # second moments of the inputs, and exponents
    assert found["optimizer_state"] == 4 * 3 * sum(num_out + num_in for num_out, num_in in sizes) + scales
    # The int8 factors and int16 exponents of the last update, which is kept to be sent.
    assert found["sync"] == sum((3 + 2) * (num_out + num_in) for num_out, num_in in sizes)


@pytest.mark.parametrize(("storage", "num_bytes"), [("split32", 4), ("split24", 3)])
def test_the_low_plane_of_split_weights_is_a_weight(make_lm, token_ids, storage, num_bytes):
    model = make_lm().to(torch.bfloat16)
    opt = logra.SketchOptimizer(model, rank=3, target_modules="all-linear", weight_storage=storage)
    whole = num_bytes * sum(target.parameter.numel() for target in opt.targets)
    assert logra.memory.profile(model, opt)["weights"] == whole


def test_dense_adamw(tiny_lm, token_ids):
    opt = torch.optim.AdamW(tiny_lm.parameters())
    backward(tiny_lm, token_ids)
    opt.step()
    found = logra.memory.profile(tiny_lm, opt)
    size = 4 * sum(parameter.numel() for parameter in tiny_lm.parameters())
    assert found["gradients"] == found["weights"] + found["non_target_parameters"] == size
    assert found["optimizer_state"] == 2 * size + 4 * len(list(tiny_lm.parameters()))


def test_shared_storages_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert sum(logra.memory.profile(model).values()) == 4 * 64


def test_something_else_than_a_model():
    with pytest.raises(LograError, match="model is a str"):
        logra.memory.profile("model")  # type: ignore[arg-type]
