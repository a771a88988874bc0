"""Replicas of FSDP2 and tensor-parallel modules in two processes hold the trainer's weights, bit for bit."""

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from logra.errors import SyncError
from logra.sync import ChecksumPart, DirectoryLog, combine_parts
from logra.sync.layout import Piece, Placement
from logra.sync.publisher import optimizer_layout

PROGRAM = Path(__file__).with_name("sharded_replica.py")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("sharded_replica", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory, runs, program) -> Path:
    """What the ranks wrote, all cases."""
    folder = tmp_path_factory.mktemp("sharded")
    for storage, run in runs.items():
        save_file(run.base, folder / f"{storage}.safetensors")
        log = DirectoryLog(folder / storage, run.manifest)
        for update in run.updates:
            log.append(update)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(PROGRAM)]
    ranks = [
        subprocess.Popen([*command, str(rank), port, str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(program.NUM_RANKS)
    ]
    errors = [process.communicate()[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * len(ranks), "\n".join(errors)
    return folder


@pytest.mark.parametrize(
    ("kind", "storage"),
    [("fsdp2", "fp32"), ("fsdp2", "split32"), ("fsdp2", "split24"), ("tp", "fp32"), ("tp", "split24")],
)
def test_sharded_modules_follow_bit_for_bit(runs, folder, program, tools, kind, storage):
    # Catches a wrong offset of a shard (9 and 14 rows on two ranks), and a write into FSDP2's gathered copy, or a forward
    # that still uses it.
    assert (kind, storage) in program.CASES
    run = runs[storage]
    weights = {name: torch.full_like(value, torch.nan) for name, value in run.weights[-1].items()}
    parts, outputs, num_sharded = [], [], 0
    for rank in range(program.NUM_RANKS):
        with safe_open(folder / f"{kind}-{storage}-{rank}.safetensors", "pt") as file:
            outputs.append(file.get_tensor("output"))
            for name, shape, rows, columns, checksum in json.loads(file.metadata()["places"]):
                parts.append(ChecksumPart(name, tuple(shape), tuple(rows), tuple(columns), checksum))
                matrix = weights[name].view(shape[0], -1)
                matrix[slice(*rows), slice(*columns)] = file.get_tensor(name)
                num_sharded += file.get_tensor(name).numel() < matrix.numel()
    assert num_sharded >= 10
    tools.assert_same_bits(weights, run.weights[-1])
    assert combine_parts(parts) == run.updates[-1].weights_digest
    if storage == "fp32":
        new, old = (program.policy(run.weights[version], torch.float32) for version in (-1, 3))
        expected = new(torch.arange(6)).detach()
        assert (old(torch.arange(6)) - expected).abs().max() > 1e-3
        for output in outputs:
            # Sums in another order: a few units of 2^-24, on values of about 1.
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_publisher_refuses_to_read_sharded_weights(monkeypatch):
    # Catches a log without digests that nobody asked for.
    half = {"w": Placement((4, 2), (Piece(torch.zeros(2, 2), (0, 2), (0, 2)),))}
    monkeypatch.setattr("logra.sync.publisher.module_layout", lambda model: half)
    optimizer = type("Optimizer", (), {"model": None, "targets": ()})
    with pytest.raises(SyncError, match="'w' is sharded"):
        optimizer_layout(optimizer)  # pyright: ignore[reportArgumentType]
