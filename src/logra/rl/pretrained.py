"""Models and tokenizers from a user's folder or hub id, and a `ConfigError` for everything that is wrong with them.

Code that comes with a model is never run: transformers would ask for leave on standard input.
"""

from collections.abc import Iterable
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


def require_fit(what: str, model: Any, tokenizer: Any, prompts: Iterable[str | list[dict[str, Any]]]) -> None:
    """Refuse a tokenizer that does not go with the prompts or with the model. One prompt of each order of roles is tried.

    Args:
        what: names the model, for messages.
        model: from `load_causal_lm`.
        tokenizer: from `load_tokenizer`.
        prompts: texts or chats.

    Raises:
        ConfigError: no end-of-sequence token, a chat template that fails, or tokens that the model has no embedding of.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{what}: its tokenizer has no end-of-sequence token, which ends a completion. Set eos_token in its "
            f"tokenizer_config.json"
        )
    kinds: dict[Any, str | list[dict[str, Any]]] = {}
    for prompt in prompts:
        kinds.setdefault(None if isinstance(prompt, str) else tuple(message["role"] for message in prompt), prompt)
    largest = max(tokenizer.eos_token_id, tokenizer.pad_token_id)
    for roles, prompt in kinds.items():
        largest = max([largest, *_ids(what, tokenizer, roles, prompt)])
    size = model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise ConfigError(
            f"{what}: its tokenizer gives the token {largest}, but the model has embeddings of the tokens 0 to {size - 1}. "
            f"Use the tokenizer that belongs to the model"
        )


def _ids(what: str, tokenizer: Any, roles: tuple[str, ...] | None, prompt: Any) -> list[int]:
    try:
        if roles is None:
            return list(tokenizer(text=prompt)["input_ids"])
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:  # of a template, which is a program of somebody else's
        form = "text" if roles is None else f"a chat of the roles {', '.join(roles)}"
        raise ConfigError(
            f"{what}: its tokenizer cannot take a prompt that is {form}: {type(error).__name__}: {error}. Choose another "
            f"model, or change the prompts or the chat template"
        ) from error


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
