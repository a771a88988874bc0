"""`GRPOTrainer` in two data-parallel processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("one_of_two.py")


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_process_without_signal_takes_part_in_the_others_step(model_folder, tmp_path):
    """Fails if a process decides alone that there is nothing to price: the step is then priced on the other's responses,
    or the process raises while the other waits for it. Fails too if the model is wrapped for gradients that never come.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model_folder), str(tmp_path)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["version"] == second["version"] == 2
    assert first["probes"] == second["probes"] == [4, 4]
    assert any(change.any() for change in first["moved"].values())
    assert all(torch.equal(first["moved"][name], second["moved"][name]) for name in first["moved"])
    assert [step["trust/realised_kl"] for step in first["steps"]] == [
        step["trust/realised_kl"] for step in second["steps"]
    ]
