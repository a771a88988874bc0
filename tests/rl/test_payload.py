"""Rollouts held small: nothing of them is lost, and freed memory goes back to the system."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra.rl import payload
from logra.rl.payload import CompactBatch

INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 1) | st.integers(-(2**31), 2**31 - 1), max_size=4)


@given(INTEGERS)
def test_integers_come_back_exactly(values):
    batch = {"ids": torch.tensor(values, dtype=torch.int64)}
    found = CompactBatch.of(batch).whole()["ids"]
    assert found.dtype == torch.int64 and torch.equal(found, batch["ids"])


def test_what_is_narrowed_and_what_is_not():
    batch = {
        "completion_ids": torch.tensor([[5, 40_000]]),
        "completion_mask": torch.tensor([[1, 0]]),
        "advantages": torch.tensor([0.1, 0.2]),
        "num_items_in_batch": torch.tensor(7),
        "wide": torch.tensor([0, 2**31]),
        "images": None,
    }
    compact = CompactBatch.of(batch)
    held = {name: value.dtype for name, value in compact.values.items() if isinstance(value, torch.Tensor)}
    assert held == {
        "completion_ids": torch.int32,
        "completion_mask": torch.bool,
        "advantages": torch.float32,
        "num_items_in_batch": torch.int64,
        "wide": torch.int64,
    }
    whole = compact.whole()
    assert whole["images"] is None and whole["advantages"] is batch["advantages"]
    for name in ("completion_ids", "completion_mask", "wide"):
        assert whole[name].dtype == torch.int64 and torch.equal(whole[name], batch[name])


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.skipif(payload._malloc_trim() is None, reason="the C library is not glibc")
def test_freed_memory_goes_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(2**16) for _ in range(2048)]  # 128 MiB in blocks too small to be mapped one by one
    for block in blocks:
        ctypes.memset(block, 1, 2**16)
    last = libc.malloc(2**16)  # above all of them, so that the heap cannot shrink from its end
    for block in blocks:
        libc.free(block)
    before = resident_bytes()
    payload.return_free_memory()
    assert before - resident_bytes() > 100 * 2**20
    libc.free(last)


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(payload, "_malloc_trim", lambda: None)
    payload.return_free_memory()
