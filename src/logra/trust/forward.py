"""Runs a language model on a probe batch and returns logits at chosen positions.

Contract of `probe_mode`: whatever happens inside, the training flag of every module, the attention implementation and
the state of the random number generators are afterwards what they were, and FSDP2 holds no gathered weight. Inside, dropout
is off (and with it the activation checkpointing of transformers, which only acts in training mode), and no graph is recorded.

Logits are produced for `CHUNK_TOKENS` positions at a time. For a transformers model with a separate head the backbone
runs once and the head once per chunk, so that [tokens, vocabulary] never exists, and responses to one prompt share its
keys and values where the model keeps plain ones. Any other module must return a logit tensor [batch, tokens,
vocabulary], or an object with `.logits`, and that tensor exists in full.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from logra.chunked_head import forward_replaced
from logra.errors import ProbeError
from logra.shards import is_fsdp, reshard
from logra.trust.attention import differentiable_attention, is_transformers_model
from logra.trust.probe import ProbeBatch
from logra.trust.shared_prefix import cache_argument, split_prefixes

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
            reshard(model)


class LogitReader:
    """Logits of one model at the generated tokens of a batch, in chunks.

    `run` does the expensive part; `read` may be called any number of times with what it returned. Forward tangents pass
    through both.

    Args:
        model: causal language model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        backbone = model.base_model if is_transformers_model(model) else model
        self._backbone: Any = backbone if backbone is not model else None
        # Under FSDP2 every call of the model is a collective, and which prompts can be shared differs between processes.
        shares = self._backbone is not None and not is_fsdp(model)
        self._cache_argument = cache_argument(model) if shares else None
        self._output_type: Any = None

    @property
    def output_is_small(self) -> bool:
        """Whether `run` returns hidden states, which may be kept, and not logits."""
        return self._backbone is not None

    def run(self, batch: ProbeBatch) -> Tensor:
        """The backbone's output at the generated tokens, [t, hidden].

        Where model and backbone are one: the logits of the whole batch, [n, w, vocabulary].
        """
        reshard(self.model)  # the head, gathered for the chunks of the batch before, would stay beside every layer
        if self._backbone is None:
            return _logits_of(self.model, self._call(batch.input_ids, batch.attention_mask), batch.input_ids.shape)
        split = split_prefixes(batch) if self._cache_argument else None
        if split is None:
            return self._hidden(batch.input_ids, batch.attention_mask)[batch.rows, batch.columns]
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        with_cache = {self._cache_argument: cache, "use_cache": True}
        positions = torch.arange(split.prefix_ids.shape[1], device=split.prefix_ids.device)[None]
        self._hidden(split.prefix_ids, split.prefix_mask, position_ids=positions, **with_cache)
        cache.batch_select_indices(split.kind)
        hidden = self._hidden(split.rest_ids, split.rest_mask, position_ids=split.rest_positions, **with_cache)
        return hidden[batch.rows, split.columns]

    def read(self, batch: ProbeBatch, output: Tensor, chunk: slice) -> Tensor:
        """Logits [n, vocabulary] that predict the generated tokens `chunk` of the batch.

        Args:
            batch: the batch that `run` got.
            output: what `run` returned.
            chunk: slice of the generated tokens.
        """
        if self._backbone is None:
            return output[batch.rows[chunk], batch.columns[chunk]]
        chosen = output[chunk][None]
        # The ids only give the call its shape: what the head sees is `chosen`.
        ids = torch.zeros(chosen.shape[:2], dtype=torch.int64, device=chosen.device)
        head_input = self._output_type(last_hidden_state=chosen)
        with forward_replaced(self._backbone, lambda *args, **kwargs: head_input):
            return _logits_of(self.model, self._call(ids, torch.ones_like(ids)), chosen.shape[:2])[0]

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Any) -> Tensor:
        """The backbone's last hidden state, [rows, columns, hidden]."""
        original = self._backbone.forward
        found: list[Tensor] = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            hidden = getattr(output, "last_hidden_state", None)
            if hidden is None:
                raise ProbeError(
                    f"the backbone of {type(self.model).__name__} returned {type(output).__name__} without "
                    "`last_hidden_state`; set config.return_dict=True."
                )
            found.append(hidden)
            self._output_type = type(output)
            return type(output)(last_hidden_state=hidden[:1, :1])

        # The head runs on one position only; calling through the model keeps its wrappers (autocast, sharding) in place.
        with forward_replaced(self._backbone, keep):
            self._call(input_ids, attention_mask, **inputs)
        return found[0]

    def _call(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Any) -> Any:
        """Call the model with those of the probe's inputs that its forward takes."""
        parameters = inspect.signature(self.model.forward).parameters
        named = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
        takes_any = len(named) < len(parameters) and not any(
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            for parameter in parameters.values()
        )
        kwargs = dict(inputs)
        if "attention_mask" in named or takes_any:
            kwargs["attention_mask"] = attention_mask
        if "use_cache" in named:
            kwargs.setdefault("use_cache", False)
        if "input_ids" in named or takes_any:
            return self.model(input_ids=input_ids, **kwargs)
        return self.model(input_ids, **kwargs)


def token_chunks(batch: ProbeBatch) -> Iterator[slice]:
    """Slices of at most `CHUNK_TOKENS` generated tokens that cover the batch."""
    for start in range(0, batch.columns.numel(), CHUNK_TOKENS):
        yield slice(start, start + CHUNK_TOKENS)


def _logits_of(model: nn.Module, output: Any, shape: tuple[int, ...]) -> Tensor:
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or tuple(logits.shape[:2]) != tuple(shape):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ProbeError(
            f"{type(model).__name__} returned {found}: the probe needs logits [batch, tokens, vocabulary] with "
            f"[batch, tokens] = {list(shape)}, as a tensor or as `.logits` of the output."
        )
    return logits
