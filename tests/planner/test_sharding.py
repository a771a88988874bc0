"""What a plan gives the process that it traces; the groups of weights are compared in tests/distributed/test_groups.py."""

from types import SimpleNamespace

import pytest

from logra.planner.sharding import owners_by_layer

SIZES = {"q_proj": 7168, "k_proj": 4096, "v_proj": 4096, "o_proj": 7168, "gate_proj": 22528, "up_proj": 22528,
         "down_proj": 22528}  # fmt: skip


def targets(num_layers):
    return [
        SimpleNamespace(fqn=f"model.layers.{layer}.{name}.weight", out_features=size - 100, in_features=100)
        for layer in range(num_layers) for name, size in SIZES.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("num_processes", "share"), [(1, 90112), (2, 45056), (4, 22528), (8, 11264), (3, 30720)])
def test_every_layer_gives_the_first_process_its_share_and_no_less(num_processes, share):
    owner_of = owners_by_layer(targets(3), num_processes)
    for layer in range(3):
        own = [name for name in SIZES if owner_of[f"model.layers.{layer}.{name}.weight"] == 0]
        assert sum(SIZES[name] for name in own) == share
        assert own == [name for name in SIZES if owner_of[f"model.layers.0.{name}.weight"] == 0]
