"""Models and tokenizers from a user's folder or hub id, and a `ConfigError` for everything that is wrong with them.

Code that comes with a model is never run: transformers would ask for leave on standard input.
"""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from logra.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.*")
"""Patterns of file names, one of which every tokenizer has."""


def load_tokenizer(what: str, location: str, *, advice: str = "", **settings: Any) -> Any:
    """Load a tokenizer.

    Args:
        what: is loaded, for messages.
        location: folder or hub id.
        advice: ends the message.
        **settings: of `from_pretrained`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(location, trust_remote_code=False, **settings)
    except Exception as error:  # of transformers and its libraries, for damaged files: they have no class in common
        reason = _reason(location, error, {"config.json": ("config.json",), "tokenizer": _TOKENIZER_FILES})
        raise ConfigError(f"{what} cannot be loaded: {reason}{advice}") from error


def load_causal_lm(what: str, location: str, *, advice: str = "", **settings: Any) -> Any:
    """Load a model, or what `from_pretrained` returns instead with these settings. Arguments are those of `load_tokenizer`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(location, trust_remote_code=False, **settings)
    except Exception as error:  # as above
        reason = _reason(location, error, {"config.json": ("config.json",)})
        raise ConfigError(f"{what} cannot be loaded: {reason}{advice}") from error


def _reason(location: str, error: Exception, needed: dict[str, tuple[str, ...]]) -> str:
    """What is wrong, in the user's terms where they are known.

    Args:
        location: folder or hub id.
        error: of transformers.
        needed: {what a folder must hold: patterns of the names it may have}.
    """
    folder = Path(location)
    if folder.is_dir():
        for what, patterns in needed.items():
            if not any(True for pattern in patterns for _ in folder.glob(pattern)):
                return f"the folder holds no {what}. Give the folder of a Hugging Face model with its tokenizer"
    if "trust_remote_code" in str(error):
        return (
            "it comes with code of its own (auto_map in its configuration), which is not supported. Choose a model of an "
            "architecture that transformers has"
        )
    missing = "" if folder.exists() else " There is no such folder here either"
    return f"{type(error).__name__}: {error}{missing}"
