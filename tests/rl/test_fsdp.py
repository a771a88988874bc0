"""What checkpoints on FSDP2 add to those of transformers, in one process. Several: tests/rl/test_accelerate.py."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import logra
from logra.errors import CheckpointError
from logra.rl import fsdp


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3))
    opt = logra.SketchOptimizer(model, target_modules="all-linear", rank=2, lr=0.01)
    return model, opt, LambdaLR(opt, lambda step: 1 / (1 + step))


def step(model, opt, scheduler):
    model(torch.ones(2, 4)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    scheduler.step()


@pytest.fixture
def saved(tmp_path):
    model, opt, scheduler = build(0)
    step(model, opt, scheduler)
    fsdp.save_state(str(tmp_path), opt, scheduler)
    return model, opt, scheduler


def test_a_checkpoint_replaces_an_older_one(saved, tmp_path):
    model, opt, scheduler = saved
    step(model, opt, scheduler)
    (tmp_path / "sharded.new").mkdir()  # of a run that was killed
    (tmp_path / "sharded.new" / "half").touch()
    fsdp.save_state(str(tmp_path), opt, scheduler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scheduler.json", "sharded"]
    other, other_opt, other_scheduler = build(1)
    fsdp.load_state(str(tmp_path), other_opt, other_scheduler)
    assert torch.equal(other[0].weight, model[0].weight)
    assert (other_opt.version, other_scheduler.last_epoch) == (2, 2)


def test_a_save_that_fails_leaves_the_older_checkpoint(saved, tmp_path, monkeypatch):
    model, opt, scheduler = saved
    weight = model[0].weight.clone()
    step(model, opt, scheduler)

    def full(path, content):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("logra.checkpoint.sharded.replace_text", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            fsdp.save_state(str(tmp_path), opt, scheduler)
    fsdp.load_state(str(tmp_path), opt, scheduler)
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "scheduler.json' is missing or damaged .*No such file"),
        (lambda path: path.write_text('{"last_ep'), "scheduler.json' is missing or damaged"),
        (lambda path: path.write_text("[]"), r"scheduler.json' is not the state of a LambdaLR"),
        (lambda path: path.write_text('{"last_epoch": 1}'), r"it needs \['base_lrs', 'last_epoch', 'lr_lambdas'\]"),
    ],
    ids=["missing", "cut", "a-list", "another"],
)
def test_a_damaged_scheduler_is_refused_before_anything_changes(damage, message, saved, tmp_path):
    damage(tmp_path / "scheduler.json")
    model, opt, scheduler = build(1)
    weight = model[0].weight.clone()
    with pytest.raises(CheckpointError, match=message):
        fsdp.load_state(str(tmp_path), opt, scheduler)
    assert torch.equal(model[0].weight, weight)
    assert (opt.version, scheduler.last_epoch) == (0, 0)
