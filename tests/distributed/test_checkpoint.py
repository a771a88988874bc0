"""Checkpoints that two processes write: read by one, two and four, they give every bit back, and the steps that follow."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_lm import SETTINGS, Model, batch, loss_of, own_part, sharded
from test_tensor_parallel import tensor_parallel

import logra
from logra.checkpoint import sharded as sharded_checkpoint
from logra.errors import CheckpointError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASES = {
    "momentum and adamw": {"non_target": "adamw", "input_scaling": True, "direction": "factored"},
    "split32": {"weight_storage": "split32", "sketch": "one_sided", "direction": "row_adam", "refresh_every": 3},
    "split24": {"weight_storage": "split24", "coherence_scaling": True},
}


KINDS = ("fsdp", "replicas")
"""Of any number of processes."""
MESHES = {"hsdp": ("replicate", "shard"), "fsdp over tp": ("shard", "tensor")}
"""Of four processes, 2 x 2."""


def build(kind, case, scale):
    """A model and its optimizer; with a scale other than 1, no weight is the one that was saved."""
    model = Model()
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    model = model.bfloat16() if case.startswith("split") else model
    if kind in MESHES:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=MESHES[kind])
        if kind == "hsdp":
            sharded(model, mesh=mesh)
        else:
            sharded(tensor_parallel(model, mesh["tensor"]), mesh=mesh["shard"])
    if kind == "fsdp" and dist.is_initialized():
        sharded(model)
    return model, logra.SketchOptimizer(model, **(SETTINGS | CASES[case]))


def take_steps(model, opt, ids, num_steps):
    """Returns the updates, dense."""
    updates = []
    for _ in range(num_steps):
        loss_of(model, ids).backward()
        opt.step()
        opt.zero_grad()
        updates.append({fqn: update.dense() for fqn, update in opt.last_update.weights.items()})
    return updates


def whole(value):
    value = torch.as_tensor(value)
    if value.dtype == torch.int16:  # gloo gathers none
        return logra.shards.whole(value.int()).short()
    return logra.shards.whole(value).clone()


def everything(model, opt):
    """Weights and state, whole, by name."""
    found = {name: whole(value) for name, value in model.state_dict().items()}
    for group in opt.param_groups:
        for fqn, parameter in zip(group["fqns"], group["params"], strict=True):
            found |= {f"{fqn}:{name}": whole(value) for name, value in opt.state[parameter].items()}
    for part in logra.distributed.gathered(found):  # moments are with the owner of their target
        found = part | found
    return found | {"version": torch.tensor(opt.version)}


def data(rank, same):
    return batch() if same else own_part(batch(), rank)


def run(rank, kind, case, same, *, resume=None, save=None):
    """Begins, or resumes where it is told from what; the state after two steps, and the two steps after it."""
    model, opt = build(kind, case, scale=1.5 if resume else 1.0)
    if resume:
        logra.checkpoint.load_sharded(resume, opt)
    else:
        take_steps(model, opt, data(rank, same), 2)
    before = everything(model, opt)
    if save:
        logra.checkpoint.save_sharded(save, opt)
    updates = take_steps(model, opt, data(rank, same), 2)
    return {"before": before, "updates": updates, "after": everything(model, opt)}


def first(rank, checkpoints):
    """On own data and on equal data, both saved."""
    return {
        (kind, case, same): run(rank, kind, case, same, save=f"{checkpoints}/{kind} {case} {same}")
        for kind in KINDS for case in CASES for same in (True, False)
    }  # fmt: skip


def resumed(rank, checkpoints, same):
    return {
        (kind, case): run(rank, kind, case, same, resume=f"{checkpoints}/{kind} {case} {same}")
        for kind in KINDS for case in CASES
    }  # fmt: skip


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    else:
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)


def test_resumed_on_one_two_and_four(workers, tmp_path):
    """On the two processes that saved it, each with data of its own, a run goes on to the bit. On other numbers of processes
    it does where sums over them come out alike: here all see the same batch. Weights and state come back in any case.
    """
    saved = workers.run(first, 2, tmp_path, checkpoints=str(tmp_path))
    again = workers.run(resumed, 2, tmp_path, checkpoints=str(tmp_path), same=False)
    for rank in range(2):
        for (kind, case), result in again[rank].items():
            assert_same(saved[rank][kind, case, False], result)
    for world_size in (1, 4):
        for results in workers.run(resumed, world_size, tmp_path, checkpoints=str(tmp_path), same=True):
            for (kind, case), result in results.items():
                assert_same(saved[0][kind, case, True], result)


def saved_on_meshes(rank, checkpoints):
    """The state after a step, saved; and what another model on the same mesh makes of the files."""
    found = {}
    for kind in MESHES:
        model, opt = build(kind, "split32", 1.0)
        take_steps(model, opt, batch(), 1)
        logra.checkpoint.save_sharded(f"{checkpoints}/{kind}", opt)
        other, other_opt = build(kind, "split32", 1.5)
        logra.checkpoint.load_sharded(f"{checkpoints}/{kind}", other_opt)
        found[kind] = everything(model, opt), everything(other, other_opt)
    return found


def test_meshes_of_two_dimensions_come_back(workers, tmp_path):
    """Fails if the copies of HSDP are lost, or if rows that FSDP2 and tensor parallelism both split come back in the order
    in which they are held.
    """
    for found in workers.run(saved_on_meshes, 4, tmp_path, checkpoints=str(tmp_path)):
        for kind, (saved, again) in found.items():
            assert_same(saved, again)
            model, opt = build("replicas", "split32", 1.5)
            logra.checkpoint.load_sharded(tmp_path / kind, opt)
            assert_same(saved, everything(model, opt))


def failing(rank, checkpoints):
    """A disk that fails on process 1 alone: while tensors are written, while they are read back, and at the end."""
    _, opt = build("fsdp", "split32", 1.0)
    writer, record, seen = dcp.HuggingFaceStorageWriter.write_data, sharded_checkpoint.file_record, []

    def fail(*_):
        raise OSError(28, "No space left on device")

    if rank == 1:
        dcp.HuggingFaceStorageWriter.write_data = fail
    with pytest.raises(CheckpointError) as caught:
        logra.checkpoint.save_sharded(f"{checkpoints}/first", opt)
    seen.append(str(caught.value))
    dcp.HuggingFaceStorageWriter.write_data = writer
    if rank == 1:
        sharded_checkpoint.file_record = fail
    with pytest.raises(CheckpointError) as caught:
        logra.checkpoint.save_sharded(f"{checkpoints}/second", opt)
    seen.append(str(caught.value))
    sharded_checkpoint.file_record = record
    with pytest.raises(CheckpointError, match="not finished"):
        logra.checkpoint.load_sharded(f"{checkpoints}/second", opt)
    logra.checkpoint.save_sharded(f"{checkpoints}/third", opt)
    return seen


def test_a_failure_of_one_process_is_everybodys(workers, tmp_path):
    """Hangs if a process goes on to a collective that the other has left."""
    (first_of_0, second_of_0), (first_of_1, second_of_1) = workers.run(failing, 2, tmp_path, checkpoints=str(tmp_path))
    assert "process 1" in first_of_0 and "No space left" in first_of_0 and first_of_0 == first_of_1
    assert "another process" in second_of_0 and "No space left" in second_of_1
