"""A tiny mixture of experts, which the tests of one process and of several share."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_EXPERTS = 8


def make_model(seed=0, num_hidden_layers=2, **settings):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        **settings,
    )
    return Qwen3MoeForCausalLM(config)
