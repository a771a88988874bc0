"""Tiny random language models in float64, probes over padded batches, and proposals for their layers."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from logra.contracts import Delta

VOCAB = 64
_COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")


class MlpLanguageModel(nn.Module):
    """A bag-of-two-tokens model: plain `forward(tokens)` that returns logits. Position-local apart from one shift."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.up = nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return self.head(self.dropout(torch.tanh(self.up(torch.cat([x, previous], dim=-1)))))


def build_model(family: str, **overrides) -> nn.Module:
    """A model of the family in float64, in training mode, weights from a fixed seed."""
    import transformers as tf

    torch.manual_seed(0)
    if family == "mlp":
        return MlpLanguageModel().double()
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
        config = tf.GPT2Config(**_COMMON, **shape, **overrides)
        return tf.GPT2LMHeadModel(config).double().train()
    classes = {
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, {}),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, {}),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {}),
        "gemma2": (
            tf.Gemma2Config,
            tf.Gemma2ForCausalLM,
            {"sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        ),
        "gemma3": (tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, {"sliding_window": 6}),
    }
    config_class, model_class, extra = classes[family]
    return model_class(config_class(**_COMMON, **_SHAPE, **extra, **overrides)).double().train()


def targets_of(model: nn.Module) -> list[nn.Module]:
    """Linear and Conv1D layers except a head that is tied to the embedding."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = []
    for module in model.modules():
        is_target = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_target and id(module.weight) not in tied:
            found.append(module)
    return found


def canonical(module: nn.Module) -> Tensor:
    """The weight as [out, in] (Conv1D stores [in, out])."""
    return module.weight.T if type(module).__name__ == "Conv1D" else module.weight


def propose(model: nn.Module, *, ratio: float, rank: int = 3, decay: float = 1.0) -> dict[nn.Module, Delta]:
    """Random float64 deltas with ‖dW‖ = ratio ‖W‖ for every target."""
    generator = torch.Generator().manual_seed(1)
    deltas = {}
    for module in targets_of(model):
        weight = canonical(module).detach()
        out_factor = torch.randn(weight.shape[0], rank, generator=generator, dtype=torch.float64)
        in_factor = torch.randn(rank, weight.shape[1], generator=generator, dtype=torch.float64)
        scale = ratio * weight.double().norm() / (out_factor @ in_factor).norm()
        deltas[module] = Delta(out_factor * scale, in_factor, decay)
    return deltas


def make_batch(*, left: int = 0, right: int = 0, seed: int = 2) -> dict[str, Tensor]:
    """Four rows: prompts of 3 to 6 tokens, responses of 9, 5, 12 and 7 tokens, padded to 18 plus `left` and `right`."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = (3, 6, 4, 5), (9, 5, 12, 7)
    width = left + 18 + right
    batch = {name: torch.zeros(4, width, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")}
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = torch.randint(3, VOCAB, (prompt + response,), generator=generator)
        start = left + 6 - prompt
        batch["input_ids"][row, start : start + prompt + response] = ids
        batch["attention_mask"][row, start : start + prompt + response] = 1
        batch["loss_mask"][row, start + prompt : start + prompt + response] = 1
    return batch


@pytest.fixture
def tiny() -> SimpleNamespace:
    """The helpers of this file (test modules cannot import it)."""
    helpers: dict[str, Callable | type] = {
        "model": build_model,
        "targets": targets_of,
        "canonical": canonical,
        "propose": propose,
        "batch": make_batch,
        "Mlp": MlpLanguageModel,
    }
    return SimpleNamespace(**helpers)
