"""Targets are shared out evenly over processes, by names and sizes alone."""

import pytest

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
