"""Keeps the libraries underneath from talking over the run: progress bars, printed metrics, advice."""

import logging
import os
import warnings

_IGNORED_WARNINGS = (
    # transformers renames arguments and properties that TRL still uses under their old names.
    (r".*is deprecated and will be removed in v(ersion )?\d.*", FutureWarning),
    # galore-torch's, about the AdamW that it is built on.
    (r"This implementation of AdamW is deprecated.*", FutureWarning),
    (r".*pin_memory.*no accelerator is found.*", UserWarning),
)


def silence_libraries() -> None:
    """Silence transformers, TRL, datasets, accelerate and the hub. Errors are still raised."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for name in ("trl", "accelerate", "huggingface_hub", "reasoning_gym"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message, category in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
