"""Targets are shared out evenly over processes, by order and sizes alone; a process holds the moments of its own."""

import pytest
import torch.distributed as dist
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import logra
from logra.optim import state
from logra.optim.ownership import shared_out

QWEN_7B = 28 * [7168, 4096, 4096, 7168, 22528, 22528, 22528]


@pytest.mark.parametrize("num_processes", [1, 2, 4, 7, 8, 64])
def test_shares_differ_by_no_more_than_the_largest_target(num_processes):
    """Catches turns by index, where seven processes and seven targets a layer would give one of them all large ones."""
    found = shared_out(QWEN_7B, num_processes)
    loads = [sum(size for size, owner in zip(QWEN_7B, found, strict=True) if owner == p) for p in range(num_processes)]
    assert max(loads) - min(loads) <= max(QWEN_7B)
    assert sum(loads) == sum(QWEN_7B)


def test_equal_sizes_go_round_and_more_processes_than_targets_leave_some_with_none():
    assert shared_out([5, 5, 5, 5, 5], 2) == [0, 1, 0, 1, 0]
    assert shared_out([3, 9], 4) == [1, 0]


@pytest.fixture
def process_1_of_2():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def a_step(model, ids):
    opt = logra.SketchOptimizer(model, lr=0.02, rank=4, target_modules=("q_proj", "k_proj", "o_proj"))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    return opt


def test_moments_of_others_are_not_copied_when_a_state_is_loaded(make_lm, token_ids, monkeypatch, request):
    """Fails if a whole state goes to the device before what others own is left out."""
    whole = a_step(make_lm(), token_ids).state_dict()
    request.getfixturevalue("process_1_of_2")
    opt = a_step(make_lm(), token_ids)
    own = {target.fqn for target in logra.optim.ownership.own_targets(opt.targets)}
    copied, copy = {}, state.on_device_of

    def on_device_of(parameter, values):
        copied[id(parameter)] = set(values)
        return copy(parameter, values)

    monkeypatch.setattr(state, "on_device_of", on_device_of)
    opt.load_state_dict(whole)
    assert 0 < len(own) < len(opt.targets)
    for index, target in enumerate(opt.targets):
        expected = state.moments(whole["state"][index]) if target.fqn in own else {}
        assert {name for name in copied[id(target.parameter)] if state.is_moment(name)} == set(expected)
        assert state.moments(opt.state[target.parameter]).keys() == expected.keys()


def test_restart_frees_an_optimizer_from_its_group(tiny_lm, token_ids, request):
    request.getfixturevalue("process_1_of_2")
    opt = a_step(tiny_lm, token_ids)
    dist.destroy_process_group()
    with pytest.raises(logra.errors.ConfigError, match="those of process 1 of 2"):
        opt.check_processes()
    opt.restart()
    opt.check_processes()
    assert state.SHARE not in opt.state_dict()["param_groups"][0]
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)  # what the fixture ends
