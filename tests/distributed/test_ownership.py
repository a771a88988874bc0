"""Gradient and moments of a target are with one process; what others ask for is what that one has."""

import logging

import pytest
import torch
import torch.distributed as dist
from sharded_lm import SETTINGS, Model, batch, loss_of, own_part, sharded
from torch.testing._internal.distributed.fake_pg import FakeStore

import logra
from logra.errors import ConfigError, LograError
from logra.optim import ownership, state

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASES = {
    "two_sided": {"direction": "factored", "input_scaling": True},
    "in": {"sketch": "one_sided", "side": "in", "direction": "row_adam", "refresh_every": 3},
    "out": {"sketch": "one_sided", "side": "out", "direction": "spectral", "input_scaling": True, "refresh_every": 3},
}


class Gradients:
    """Keeps what an observer of every step sees of the recovered gradients."""

    def attached(self, targets):
        self.found = []

    def detached(self):
        pass

    def begin_window(self, step):
        pass

    def observe(self, view):
        deltas = {fqn: make() for fqn, make in view.gradients.items()}
        self.found.append({fqn: delta.out_factor @ delta.in_factor for fqn, delta in deltas.items()})
        return {}


def build(**settings):
    model = Model()
    return model, logra.SketchOptimizer(model, **(SETTINGS | settings))


def steps(model, opt, ids, num_steps):
    for _ in range(num_steps):
        loss_of(model, ids).backward()
        opt.step()
        opt.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def moments_of(opt):
    return {target.fqn: state.moments(opt.state[target.parameter]) for target in opt.targets}


def shared(rank, files):
    found = {}
    for name, settings in CASES.items():
        model, opt = build(**settings)
        observer = Gradients()
        opt.add_observer(observer)
        steps(model, opt, batch(), 2)
        partial, whole = opt.state_dict(), opt.whole_state_dict()
        if rank == 0:
            torch.save({"whole": whole, "model": model.state_dict(), "partial": partial}, f"{files}/{name}.state")
        own = {fqn for fqn, values in moments_of(opt).items() if values}
        logra.distributed.gathered(None)  # the file is there
        again, other = build(**settings)
        saved = torch.load(f"{files}/{name}.state")
        again.load_state_dict(saved["model"])
        other.load_state_dict(saved["whole"])
        same = {fqn for fqn, values in moments_of(other).items() if values} == own
        refused = ""
        try:
            build(**settings)[1].load_state_dict(saved["partial"])
        except LograError as error:
            refused = str(error)
        found[name] = {
            "own": own,
            "expected": {target.fqn for target in ownership.own_targets(opt.targets)},
            "same": same,
            "refused": refused,
            "gradients": list(observer.found),
            "on": steps(model, opt, batch(), 2),
            "resumed": steps(again, other, batch(), 2),
        }
    return found


def test_a_state_is_saved_whole_and_every_process_takes_its_part(workers, tmp_path):
    """Fails if moments of one owner are lost on the way, or if a process goes on without those of another's file."""
    first, second = workers.run(shared, 2, tmp_path, files=str(tmp_path))
    for name, settings in CASES.items():
        one, other = first[name], second[name]
        assert one["own"] == one["expected"] and other["own"] == other["expected"]
        assert one["own"] and other["own"] and not one["own"] & other["own"]
        assert one["same"] and other["same"]
        assert "another process was refused" in one["refused"]  # its own file, but all go on or none
        assert "that of process 0 of 2" in other["refused"]
        for fqn, weight in one["on"].items():
            assert all(torch.equal(weight, result) for result in (other["on"][fqn], one["resumed"][fqn]))
            assert torch.equal(weight, other["resumed"][fqn])
        # One process, on the same batch: the mean of equal sketches has their bits.
        model, opt = build(**settings)
        observer = Gradients()
        opt.add_observer(observer)
        steps(model, opt, batch(), 2)
        for mine, theirs, alone in zip(one["gradients"], other["gradients"], observer.found, strict=True):
            assert mine.keys() == alone.keys() == theirs.keys()
            for fqn, gradient in alone.items():
                assert torch.equal(mine[fqn], gradient) and torch.equal(theirs[fqn], gradient), (name, fqn)
        model, opt = build(**settings)
        saved = torch.load(tmp_path / f"{name}.state")
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["whole"])
        assert all(torch.equal(one["on"][fqn], weight) for fqn, weight in steps(model, opt, batch(), 2).items())


def a_failure(rank, kind):
    """Process 1 cannot recover its part."""
    errors = {"linalg": torch.linalg.LinAlgError, "memory": torch.OutOfMemoryError, "type": TypeError}
    model, opt = build()
    recover = logra.optim.gradients.gradient_two_sided
    if rank == 1:

        def fail(*args):
            raise errors[kind]("what went wrong")

        logra.optim.gradients.gradient_two_sided = fail
    loss_of(model, own_part(batch(), rank)).backward()
    try:
        opt.step()
    except Exception as error:
        logra.optim.gradients.gradient_two_sided = recover
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "name"), [("linalg", "_LinAlgError"), ("memory", "OutOfMemoryError"), ("type", "TypeError")]
)
def test_a_failure_of_one_owner_is_everybodys(workers, tmp_path, kind, name):
    """Fails, by the timeout of the others' collective, if an error of some other class leaves the action alone."""
    first, second = workers.run(a_failure, 2, tmp_path, kind=kind)
    assert "another process could not recover its part of the update" in first
    assert second == f"{name}: what went wrong"


def watched_by_one(rank):
    found = {}
    logra.distributed.BUCKET_BYTES = 1000  # some factors are larger, and some buckets hold several
    for name, is_watched in (("watched", rank == 1), ("alone", False)):
        model, opt = build()
        observer = Gradients()
        if is_watched:
            opt.add_observer(observer)
        found[name] = steps(model, opt, batch(), 2)
        if is_watched:
            found["gradients"] = observer.found
    return found


def test_an_observer_of_one_process_sees_all_gradients(workers, tmp_path):
    """Fails, by a timeout, if only the process with the observer enters the exchange of gradients."""
    first, second = workers.run(watched_by_one, 2, tmp_path)
    for fqn, weight in first["alone"].items():
        assert all(torch.equal(weight, found["watched"][fqn]) for found in (first, second)), fqn
    model, opt = build()
    observer = Gradients()
    opt.add_observer(observer)
    steps(model, opt, batch(), 2)
    for theirs, alone in zip(second["gradients"], observer.found, strict=True):
        assert theirs.keys() == alone.keys()
        assert all(torch.equal(theirs[fqn], gradient) for fqn, gradient in alone.items())


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def after_the_group(rank, files):
    """Saves in every way before and after the end of the process group."""
    messages = Messages()
    logging.getLogger("logra").addHandler(messages)
    model, opt = build()
    opt.load_state_dict(opt.state_dict())
    steps(model, opt, batch(), 1)
    with opt.whole_state():
        inside = opt.state_dict()["param_groups"][0].get(state.SHARE)
    silent = list(messages.found)
    for _ in range(2):
        part = opt.state_dict()["param_groups"][0][state.SHARE]
    found = {"inside": inside, "silent": silent, "warned": list(messages.found), "part": part, "refused": []}
    dist.barrier()
    dist.destroy_process_group()
    found["after"] = opt.state_dict()["param_groups"][0][state.SHARE]
    loss_of(model, batch()).backward()
    for action in (opt.whole_state_dict, opt.step, lambda: logra.checkpoint.save_sharded(f"{files}/{rank}", opt)):
        try:
            action()
        except ConfigError as error:
            found["refused"].append(str(error))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # what the worker destroys at the end
    return found


def test_moments_outlive_their_group_as_a_part(workers, tmp_path):
    """Fails if a part is taken for the whole once there is no group, or if it is saved by one process without a word."""
    for rank, found in enumerate(workers.run(after_the_group, 2, tmp_path, files=str(tmp_path))):
        assert found["inside"] == (None if rank == 0 else [1, 2])
        assert found["silent"] == []
        assert len(found["warned"]) == 1 and f"process {rank} of 2 alone" in found["warned"][0]
        assert found["part"] == found["after"] == [rank, 2]
        assert len(found["refused"]) == 3
        assert all(f"those of process {rank} of 2; this is now process 0 of 1" in text for text in found["refused"])


def sharded_moments(rank):
    model = sharded(Model())
    opt = logra.SketchOptimizer(model, **SETTINGS)
    steps(model, opt, own_part(batch(), rank), 1)
    return {
        fqn: sum(v.numel() for v in values.values() if torch.is_tensor(v)) for fqn, values in moments_of(opt).items()
    }


def test_shards_divide_the_moments(workers, tmp_path):
    first, second = workers.run(sharded_moments, 2, tmp_path)
    assert all((first[fqn] == 0) != (second[fqn] == 0) for fqn in first)
    assert sum(first.values()) == sum(second.values())
