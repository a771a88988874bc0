"""Sharded checkpoints in one process: what is refused, and that nothing has changed then. Several: tests/distributed."""

import json

import pytest
import torch
from torch import nn

import logra
from logra.checkpoint import load_sharded, save_sharded, sharded
from logra.errors import CheckpointError, ConfigError


def build(width=6, scale=1.0, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
    model.requires_grad_(True)
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    return model, logra.SketchOptimizer(model, **{"target_modules": "all-linear", "rank": 2, "lr": 0.01} | settings)


def step(model, opt):
    torch.manual_seed(opt.version)
    model(torch.randn(5, 4)).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.fixture
def saved(tmp_path):
    model, opt = build()
    step(model, opt)
    save_sharded(tmp_path / "checkpoint", opt)
    return tmp_path / "checkpoint"


def test_nothing_in_the_folder_is_a_pickle(saved):
    """A pickle of protocol 2 and later begins with 0x80; older ones and torch.save's are neither JSON nor safetensors."""
    assert sorted(path.suffix for path in saved.iterdir()) == ["", ".json", ".safetensors"]
    assert all(path.read_bytes()[:1] != b"\x80" for path in saved.iterdir())


def test_tied_weights_are_saved_once_and_come_back(tmp_path):
    def tied(scale):
        model, opt = build()
        opt.detach()
        model = nn.Sequential(model, nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[2].weight
        model.requires_grad_(True)
        model[2].weight.data.mul_(scale)
        return model, logra.SketchOptimizer(model, target_modules=("0.0", "0.2"), rank=2)

    model, opt = tied(1.0)
    step(model, opt)
    save_sharded(tmp_path / "checkpoint", opt)
    other, other_opt = tied(2.0)
    load_sharded(tmp_path / "checkpoint", other_opt)
    assert other[1].weight is other[2].weight
    assert torch.equal(other[2].weight, model[2].weight)


def test_a_folder_with_files_is_not_written_to(saved):
    with pytest.raises(CheckpointError, match="not empty"):
        save_sharded(saved, build()[1])


def test_files_are_made_durable_by_saving_alone(monkeypatch, tmp_path):
    synced = []
    monkeypatch.setattr(sharded, "fsync", synced.append)
    _, opt = build()
    folder = tmp_path / "checkpoint"
    save_sharded(folder, opt)
    assert sorted(synced) == sorted([folder, *(path for path in folder.iterdir() if path.name != "COMPLETE")])
    synced.clear()
    load_sharded(folder, opt)
    assert synced == []


def cut(folder):
    path = next(folder.glob("shard*"))
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = next(folder.glob("shard*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def of_another_format(folder):
    marker = json.loads((folder / "COMPLETE").read_text())
    (folder / "COMPLETE").write_text(json.dumps(marker | {"format_version": 2}))


DAMAGES = {
    "not finished": (lambda folder: (folder / "COMPLETE").unlink(), "not finished"),
    "cut": (cut, "differs"),
    "flipped bit": (flip, "differs"),
    "missing shard": (lambda folder: next(folder.glob("shard*")).unlink(), "No such file"),
    "a shard too many": (lambda folder: (folder / "shard-2.safetensors").touch(), "does not belong"),
    "format": (of_another_format, "reads format 1"),
    "marker": (lambda folder: (folder / "COMPLETE").write_text("{}"), "KeyError"),
    "no folder": (lambda folder: folder.rename(folder.with_name("elsewhere")), "is no checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_and_changes_nothing(damage, saved):
    harm, message = DAMAGES[damage]
    harm(saved)
    model, opt = build(scale=2.0)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        load_sharded(saved, opt)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert opt.version == 0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"width": 7}, ConfigError, "other parameters"),
        ({"rank": 3}, ConfigError, "rank=2"),
        ({"non_target": "adamw"}, ConfigError, "other parameters"),
        ({"dtype": torch.bfloat16, "weight_storage": "split32"}, ConfigError, "weight_storage"),
    ],
)
def test_another_model_or_other_settings_are_refused_and_change_nothing(settings, error, message, saved):
    model, opt = build(scale=2.0, **settings)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(error, match=message):
        load_sharded(saved, opt)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_frozen_part_of_another_shape_is_refused(saved):
    """The targets agree, so that only the weights themselves can tell."""
    model, opt = build()
    opt.detach()
    model = nn.Sequential(*model, nn.LayerNorm(3))
    opt = logra.SketchOptimizer(model, target_modules="all-linear", rank=2, lr=0.01)
    with pytest.raises(CheckpointError, match=r"another model: model\.3"):
        load_sharded(saved, opt)
