"""Runs a language model on a probe batch and returns logits at chosen positions.

Contract of `probe_mode`: whatever happens inside, the training flag of every module, the attention implementation and
the state of the random number generators are afterwards what they were. Inside, dropout is off (and with it the
activation checkpointing of transformers, which only acts in training mode), and no graph is recorded.

Logits are produced for `CHUNK_TOKENS` positions at a time. For a transformers model with a separate head the backbone
runs once and the head once per chunk, so that [tokens, vocabulary] never exists. Any other module must return a logit
tensor [batch, tokens, vocabulary], or an object with `.logits`, and that tensor exists in full.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import ProbeError
from logra.trust.attention import differentiable_attention, is_transformers_model
from logra.trust.probe import ProbeBatch

CHUNK_TOKENS = 256


@contextmanager
def probe_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode, differentiable attention, no autograd graph, and nothing left behind."""
    flags = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type != "cpu" else []
    with (
        torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
        torch.no_grad(),
        differentiable_attention(model),
    ):
        try:
            for module, _ in flags:
                # The flag itself: `train()` may be overridden with side effects, such as merging adapters.
                module.training = False
            yield
        finally:
            for module, training in flags:
                module.training = training


class LogitReader:
    """Logits of one model at the generated tokens of a batch, in chunks.

    `run` does the expensive part; `read` may be called any number of times with what it returned. Forward tangents pass
    through both.

    Args:
        model: causal language model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        backbone = model.base_model if is_transformers_model(model) else model
        self._backbone: Any = backbone if backbone is not model else None

    def run(self, batch: ProbeBatch) -> Any:
        """The backbone's output for the whole batch (or the logits, where model and backbone are one)."""
        if self._backbone is None:
            return _logits_of(self.model, self._call(batch), batch.input_ids.shape)
        original = self._backbone.forward
        outputs = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            outputs.append(original(*args, **kwargs))
            return _positions(self.model, outputs[0], batch.rows[:1], batch.columns[:1])

        # The head runs on one position only; calling through the model keeps its wrappers (autocast, sharding) in place.
        with _forward_replaced(self._backbone, keep):
            self._call(batch)
        return outputs[0]

    def read(self, batch: ProbeBatch, output: Any, chunk: slice) -> Tensor:
        """Logits [n, vocabulary] that predict the generated tokens `chunk` of the batch.

        Args:
            batch: the batch that `run` got.
            output: what `run` returned.
            chunk: slice of the generated tokens.
        """
        rows, columns = batch.rows[chunk], batch.columns[chunk]
        if self._backbone is None:
            return output[rows, columns]
        chosen = _positions(self.model, output, rows, columns)
        with _forward_replaced(self._backbone, lambda *args, **kwargs: chosen):
            return _logits_of(self.model, self._call(batch), (1, rows.numel()))[0]

    def _call(self, batch: ProbeBatch) -> Any:
        """Call the model with those of the probe's inputs that its forward takes."""
        parameters = inspect.signature(self.model.forward).parameters
        named = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
        takes_any = len(named) < len(parameters) and not any(
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            for parameter in parameters.values()
        )
        kwargs: dict[str, Any] = {}
        if "attention_mask" in named or takes_any:
            kwargs["attention_mask"] = batch.attention_mask
        if "use_cache" in named:
            kwargs["use_cache"] = False
        if "input_ids" in named or takes_any:
            return self.model(input_ids=batch.input_ids, **kwargs)
        return self.model(batch.input_ids, **kwargs)


def token_chunks(batch: ProbeBatch) -> Iterator[slice]:
    """Slices of at most `CHUNK_TOKENS` generated tokens that cover the batch."""
    for start in range(0, batch.columns.numel(), CHUNK_TOKENS):
        yield slice(start, start + CHUNK_TOKENS)


@contextmanager
def _forward_replaced(module: Any, forward: Any) -> Iterator[None]:
    """Set the instance attribute `forward` and put back what was there: an earlier instance attribute, or none."""
    had, before = "forward" in vars(module), vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if had:
            module.forward = before
        else:
            del module.forward


def _positions(model: nn.Module, output: Any, rows: Tensor, columns: Tensor) -> Any:
    """A backbone output of the same type that holds only the chosen positions, as one row [1, n, hidden]."""
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise ProbeError(
            f"the backbone of {type(model).__name__} returned {type(output).__name__} without `last_hidden_state`; "
            "set config.return_dict=True."
        )
    return type(output)(last_hidden_state=hidden[rows, columns][None])


def _logits_of(model: nn.Module, output: Any, shape: tuple[int, ...]) -> Tensor:
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or tuple(logits.shape[:2]) != tuple(shape):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ProbeError(
            f"{type(model).__name__} returned {found}: the probe needs logits [batch, tokens, vocabulary] with "
            f"[batch, tokens] = {list(shape)}, as a tensor or as `.logits` of the output."
        )
    return logits
