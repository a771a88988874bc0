"""A living trainer returns to an earlier policy, and whoever follows its log comes along."""

import pytest
import torch
from transformers import TrainerCallback

import logra
from logra.checkpoint import CheckpointStore
from logra.errors import CheckpointError
from logra.rl import GRPOTrainer
from logra.rl.checkpoints import roll_back, save
from logra.rl.grpo import CheckedGRPOTrainer


class RollBackOnce(TrainerCallback):
    """Saves after step 1, returns there after step 2."""

    def __init__(self, trainer, store):
        self.trainer, self.store, self.seen = trainer, store, {}

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" not in logs:
            return
        if state.global_step == 1:
            self.checkpoint = save(self.trainer, self.store)
        if state.global_step == 2:
            self.seen["before"] = self.state()
            assert roll_back(self.trainer, self.store, self.checkpoint) == 1
        self.seen[state.global_step] = self.state()

    def state(self):
        weights = {name: value.detach().clone() for name, value in self.trainer.model.named_parameters()}
        momentum = [
            value.clone()
            for _, state in sorted(self.trainer._bare_optimizer().state_dict()["state"].items())
            for _, value in sorted(state.items())
            if torch.is_tensor(value)
        ]
        return weights, momentum


def same(first, second):
    return all(torch.equal(first[0][name], second[0][name]) for name in first[0]) and all(
        torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True)
    )


def build(kind, make_model, make_args, dataset, tokenizer, reward, **extra):
    return kind(
        model=make_model(), reward_funcs=reward, args=make_args(max_steps=3), train_dataset=dataset,
        processing_class=tokenizer, **extra,
    )  # fmt: skip


@pytest.mark.parametrize("storage", ["fp32", "split32", "split24"])
def test_replicas_follow_a_roll_back(tmp_path, make_model, make_args, dataset, tokenizer, num_letters, storage):
    """Fails if the log gets a gap or a second history, or if momentum of the steps taken back survives."""

    def model():
        return make_model().to(torch.float32 if storage == "fp32" else torch.bfloat16)

    config = logra.Config(rank=4, lr=1e-3, weight_storage=storage)
    trainer = build(GRPOTrainer, model, make_args, dataset, tokenizer, num_letters, logra=config)
    optimizer = trainer.create_optimizer()
    log = logra.sync.DirectoryLog(tmp_path / "updates")
    trainer.publish_to(logra.sync.Publisher(log, optimizer))
    callback = RollBackOnce(trainer, CheckpointStore(tmp_path / "checkpoints"))
    trainer.add_callback(callback)
    trainer.train()
    seen = callback.seen
    assert same(seen[2], seen[1]) and not same(seen["before"], seen[1])
    # Versions 1, 2, the roll back as version 3, and the step after it.
    assert trainer.sketch_optimizer.version == log.latest() == 4
    assert len(log.read(3).tensors) == len(log.read(2).weights) and not log.read(3).weights
    replica = logra.sync.Replica(model(), version=0, storage=storage)
    replica.catch_up(log)
    assert replica.digest() == logra.sync.publisher.weights_digest(logra.sync.publisher.optimizer_layout(optimizer))


def test_a_dense_trainer_rolls_back(tmp_path, make_model, make_args, dataset, tokenizer, num_letters):
    trainer = build(CheckedGRPOTrainer, make_model, make_args, dataset, tokenizer, num_letters)
    callback = RollBackOnce(trainer, CheckpointStore(tmp_path / "checkpoints"))
    trainer.add_callback(callback)
    trainer.train()
    assert same(callback.seen[2], callback.seen[1]) and not same(callback.seen["before"], callback.seen[1])
    assert not same(callback.seen[3], callback.seen[2])


def test_a_damaged_checkpoint_changes_nothing(tmp_path, make_model, make_args, dataset, tokenizer, num_letters):
    trainer = build(CheckedGRPOTrainer, make_model, make_args, dataset, tokenizer, num_letters)
    trainer.train()
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoint = save(trainer, store)
    (checkpoint.path / "state.json").write_text("{}")
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"state\.json is not what was written"):
        roll_back(trainer, store, checkpoint)
    assert all(torch.equal(before[name], value) for name, value in trainer.model.named_parameters())
