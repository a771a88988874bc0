"""examples/trl_grpo.py as one process of `accelerate launch`, and what the trainer in it did; see test_accelerate.py.

The example runs twice: the second time it goes on from a checkpoint that the first left after one step.

Usage: launched_example.py OUTPUT_FOLDER
"""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import torch
from cpu_fsdp import allow_fsdp_on_cpus
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

import logra
from logra.rl import GRPOTrainer
from logra.shards import is_fsdp, reshard, whole

RANK, OUTPUT = int(os.environ["RANK"]), Path(sys.argv[1])
RESUME = None
RESULTS = []
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"


def letters(completions, **_):
    # Every group of the second process is without signal, none of the first is.
    return [0.35 if RANK else sum(map(str.isalpha, text)) / 8 for text in completions]


def whole_weights(model):
    reshard(model)
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


class Packets(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer
        self.bytes = []

    def on_optimizer_step(self, args, state, control, **_):
        self.bytes.append(self.trainer.sketch_optimizer.last_update.to_bytes())


class Recorded(GRPOTrainer):
    """The example's trainer, with a trust region and processes that differ."""

    def __init__(self, *, args, **kwargs):
        # Fewer tokens on one process: fewer forwards to generate them, and under FSDP2 each is a collective.
        args.max_completion_length = 3 if RANK else 8
        args.output_dir, args.save_strategy, args.save_steps = str(OUTPUT / "trl"), SaveStrategy.STEPS, 1
        kwargs["reward_funcs"] = letters
        kwargs["logra"] = logra.Config(
            rank=4, trust=logra.TrustRegion(kl_budget=1e-3, alpha_max=1e6, min_responses=16, min_tokens=1)
        )
        super().__init__(args=args, **kwargs)

    def train(self):
        optimizer = self.create_optimizer()
        probes, set_probe = [], optimizer.set_probe
        optimizer.set_probe = lambda **tensors: (probes.append(len(tensors["input_ids"])), set_probe(**tensors))
        packets = Packets(self)
        self.add_callback(packets)
        start = whole_weights(self.model)
        super().train(resume_from_checkpoint=RESUME)
        result = {
            "start": start,
            "weights": whole_weights(self.model),
            "packets": packets.bytes,
            "probes": probes,
            "realised_kl": [log["trust/realised_kl"] for log in self.state.log_history if "loss" in log],
            "is_fsdp": is_fsdp(self.model),
        }
        RESULTS.append(result)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    allow_fsdp_on_cpus()
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.GRPOTrainer = Recorded
    example.main(["--steps", "2"])
    RESUME = str(OUTPUT / "trl" / "checkpoint-1")
    example.main(["--steps", "2"])
    torch.save(RESULTS, OUTPUT / f"{RANK}.pt")
