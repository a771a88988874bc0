"""GRPO with TRL, trained by gradient sketches: the import of the trainer is the one line that must change.

python examples/trl_grpo.py                       # a tiny random Llama, a few seconds on a CPU
python examples/trl_grpo.py --model path/to/model
accelerate launch --config_file examples/accelerate/ddp.yaml examples/trl_grpo.py      # or fsdp2.yaml: several processes
"""

import argparse
import string
import tempfile

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import GRPOConfig  # pyright: ignore[reportPrivateImportUsage]

import logra
from logra.rl import GRPOTrainer  # instead of: from trl import GRPOTrainer


def tiny_model():
    """A random Llama over single characters."""
    vocabulary = ["<unk>", "<eos>", *string.ascii_lowercase, *string.digits, *" +-=?."]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=vocabulary.index("<eos>"),
    )
    return LlamaForCausalLM(config), tokenizer


def reward_digits(completions, **kwargs):
    """The share of digits in a completion: easy to raise, so that the training shows."""
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder or hub id (default: a tiny random Llama)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    arguments = parser.parse_args(argv)

    has_gpu = torch.cuda.is_available()
    set_seed(0)  # several processes must begin with the same weights
    if arguments.model is None:
        model, tokenizer = tiny_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward_digits,
            train_dataset=Dataset.from_dict({"prompt": [f"{a} + {b} =" for a in range(10) for b in range(10)]}),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                num_generations=8,
                max_completion_length=8,
                activation_checkpointing=False,
                bf16=has_gpu,
                use_cpu=not has_gpu,
                dataloader_pin_memory=has_gpu,
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                report_to=[],
            ),
            # Optional. A tiny random model can take longer steps than the default, which is for pretrained ones.
            logra=logra.Config(lr=1e-2) if arguments.model is None else None,
        )
        trainer.train()
    rewards = [entry["reward/mean"] for entry in trainer.state.log_history if "reward/mean" in entry]
    if trainer.is_world_process_zero():
        print(f"mean reward {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
    return rewards


if __name__ == "__main__":
    main()
