"""One of two processes that train together; started by test_several_processes.py with torchrun's environment.

Usage: one_of_two.py MODEL_FOLDER OUTPUT_FOLDER
"""

import os
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import logra
from logra.rl import GRPOTrainer

RANK = int(os.environ["RANK"])


def letters(completions, **_):
    # Every group of the second process is without signal, none of the first is.
    return [0.35 if RANK else sum(map(str.isalpha, text)) / 8 for text in completions]


def main(model: str, output: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model)
    start = {name: value.clone() for name, value in policy.state_dict().items()}
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=letters,
        args=GRPOConfig(
            output_dir=str(output / "trl"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            dataloader_pin_memory=False,
            activation_checkpointing=False,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i} +" for i in range(8)]}),
        processing_class=AutoTokenizer.from_pretrained(model),
        logra=logra.Config(rank=4, trust=logra.TrustRegion(kl_budget=1e-3, alpha_max=1e6, min_tokens=16)),
    )
    optimizer = trainer.create_optimizer()
    probes, original = [], optimizer.set_probe
    optimizer.set_probe = lambda **tensors: (probes.append(len(tensors["input_ids"])), original(**tensors))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    moved = {name: value - start[name] for name, value in policy.state_dict().items()}
    result = {"moved": moved, "steps": steps, "version": trainer.sketch_optimizer.version, "probes": probes}
    torch.save(result, output / f"{RANK}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
