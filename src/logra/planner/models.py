"""Models to plan for: presets (configurations only, nothing is downloaded), JSON files, folders."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from logra.errors import ConfigError


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768, "use_sliding_window": False,
    }  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False, "max_position_embeddings": 40960,
    }  # fmt: skip


def _llama3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064, False),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64),
    "gemma-3-27b": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
        "query_pre_attn_scalar": 168, "sliding_window": 1024, "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""By name in lower case; the language part of a multimodal model."""


def load_config(model: str) -> Any:
    """The transformers configuration of a preset, a config.json, or a folder that holds one.

    Raises:
        ConfigError: no such preset, file or folder, one that transformers does not know, or one without the sizes of a
            decoder.
    """
    from transformers import AutoConfig

    settings = PRESETS.get(model.lower().rpartition("/")[2])
    path = Path(os.path.expanduser(model))
    if settings is None:
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"model={model!r}: neither a preset ({', '.join(PRESETS)}), nor the path of a config.json, nor a folder "
                f"that holds one"
            )
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"model={model!r}: {file} is not a JSON configuration: {error}") from error
    if isinstance(settings, dict) and settings.get("text_config") is not None:
        settings = settings["text_config"]
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ConfigError(f"model={model!r}: the configuration has no model_type")
    try:
        config = AutoConfig.for_model(**settings)
    except Exception as error:  # of transformers, for values that no model has: they have no class in common
        raise ConfigError(
            f"model={model!r}: transformers does not take this configuration: {type(error).__name__}: {error}"
        ) from error
    _require_sizes(model, config)
    return config


def _require_sizes(model: str, config: Any) -> None:
    """Refuse a configuration that lacks a size which the plan reads, before anything is traced."""
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        value = getattr(config, name, None)
        if value is None:
            raise ConfigError(
                f"model={model!r}: a configuration of type {config.model_type} without {name} cannot be planned for. Give "
                f"that of a decoder such as {', '.join(list(PRESETS)[:2])}"
            )
        _require_size(model, name, value)
    for name in ("num_key_value_heads", "head_dim"):
        if (value := getattr(config, name, None)) is not None:
            _require_size(model, name, value)
    if getattr(config, "head_dim", None) is None and config.num_attention_heads > config.hidden_size:
        raise ConfigError(
            f"model={model!r}: num_attention_heads={config.num_attention_heads} are more than hidden_size="
            f"{config.hidden_size}"
        )


def _require_size(model: str, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model={model!r}: {name}={value!r}: must be an integer of at least 1")


def meta_model(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The model of a transformers configuration, without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
