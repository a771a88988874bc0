"""The example under `accelerate launch`, with the configs that are shipped for it, in two CPU processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from logra.update import PolicyUpdate

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launched_example.py")


def launch(config: str, folder: Path) -> list[list[dict]]:
    folder.mkdir()
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    options = ["--config_file", str(ROOT / "examples" / "accelerate" / config), "--num_processes", "2",
               "--main_process_port", "0"]  # fmt: skip
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "distributed"), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [*launcher, *options, str(SCRIPT), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.launch
@pytest.mark.timeout(900)
def test_the_example_trains_alike_on_replicas_and_on_shards(tmp_path):
    """Fails if a process decides alone that there is nothing to price (the second has no signal), if the model is wrapped
    for gradients that never come, if accelerate shards the weights away from the optimizer, and, by its timeout, if a
    process whose responses have ended leaves the other alone with FSDP2's collectives. The second of two steps is taken
    again from the checkpoint after the first, to the bit.
    """
    runs = {name: launch(f"{name}.yaml", tmp_path / name) for name in ("ddp", "fsdp2")}
    for name, ((first, first_resumed), (second, second_resumed)) in runs.items():
        assert first["is_fsdp"] == second["is_fsdp"] == (name == "fsdp2")
        assert first["packets"] == second["packets"]
        assert first["probes"] == second["probes"] == [16, 16]
        assert first["realised_kl"] == second["realised_kl"]
        updates = [PolicyUpdate.from_bytes(packet) for packet in first["packets"]]
        assert [update.version for update in updates] == [1, 2]
        for fqn, start in first["start"].items():
            expected = start.clone()
            for update in updates:
                if fqn in update.weights:
                    expected -= update.weights[fqn].dense()
            assert torch.equal(first["weights"][fqn], expected), fqn
            assert torch.equal(second["weights"][fqn], expected), fqn
            assert ("proj" in fqn) == (not torch.equal(start, expected)), fqn
        assert first_resumed["packets"] == second_resumed["packets"] == first["packets"][1:]
        for resumed in (first_resumed, second_resumed):
            assert all(torch.equal(resumed["weights"][fqn], weight) for fqn, weight in first["weights"].items())
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name / "trl" / "checkpoint-2").state_dict()
        assert all(torch.equal(saved[fqn], weight) for fqn, weight in first["weights"].items())
    replicas, shards = (runs[name][0][0] for name in ("ddp", "fsdp2"))
    for fqn, weight in replicas["weights"].items():
        assert torch.equal(replicas["start"][fqn], shards["start"][fqn])
        # The same responses, and gradients up to rounding: integers differ in close calls alone.
        moved = (weight - replicas["start"][fqn]).norm()
        assert (shards["weights"][fqn] - weight).norm() <= 0.05 * moved, fqn
