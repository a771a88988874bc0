"""A tiny chat model with a character tokenizer whose pad token is its end-of-sequence token, as SmolLM2's is."""

import string

import pytest
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from logra.rl.rewards import completion_text

EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '" + EOS + "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = ["<unk>", EOS, *string.digits, *string.ascii_letters, *" +-=?:.*\n"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=EOS, pad_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.2,  # the usual 0.02 would leave so small a model with a flat, immovable policy
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def make_model(tokenizer):
    """Builds seeded models, equal for equal seeds."""
    return lambda seed=0: build_model(tokenizer, seed)


@pytest.fixture
def model(make_model) -> LlamaForCausalLM:
    return make_model()


@pytest.fixture
def model_folder(tmp_path, tokenizer, model):
    """The tiny model as a Hugging Face folder."""
    folder = tmp_path / "tiny-model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def dataset() -> Dataset:
    """Prompts of different lengths, so that batches are padded."""
    prompts = [[{"role": "user", "content": "9" * (1 + i % 4) + " = ?"}] for i in range(8)]
    return Dataset.from_list([{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(prompts)])


@pytest.fixture
def num_letters():
    """A reward with spread, and easy to raise: the number of letters."""

    def num_letters(completions, **_):
        texts = [completion_text(completion) for completion in completions]
        return [sum(character.isalpha() for character in text) / 8 for text in texts]

    return num_letters


@pytest.fixture
def make_args(tmp_path):
    """GRPO settings for CPU: 2 prompts x 4 samples in 2 micro-batches of 4."""

    def make(**overrides) -> GRPOConfig:
        settings = {
            "output_dir": str(tmp_path / "trl"),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "dataloader_pin_memory": False,
            "activation_checkpointing": False,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "lr_scheduler_type": "constant",
        }
        return GRPOConfig(**(settings | overrides))

    return make


def pytest_collection_modifyitems(items):
    # transformers has renamed what TRL still reads under the old name; nothing here can avoid it.
    for item in items:
        if item.path.parent.name in ("rl", "cli"):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning"))
