"""Answers for a step without numbers."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from logra.planner.stand_in import StandIn


def test_a_step_that_goes_well():
    with FakeTensorMode(), StandIn():
        norm = torch.randn(3).norm()
        assert bool(torch.isfinite(norm)) and not bool(norm == 0) and not bool(torch.isnan(norm))
        assert norm.item() == 1.0 and torch.randn(2).argmax().item() == 1
        assert torch.stack(torch.aminmax(torch.randn(3))).tolist() == [1.0, 1.0]


def test_constants_keep_their_value():
    with FakeTensorMode(), StandIn():
        assert torch.tensor(0.25).item() == 0.25
