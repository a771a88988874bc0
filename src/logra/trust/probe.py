"""Which generated tokens the trust region looks at.

A probe is a few responses drawn from the training batch, without their padding. Convention for every tensor
[batch, tokens]: `loss_mask` is 1 at a token that the policy generated, and the token at column t is predicted by the
logits at column t - 1 of the same row. Rows are stored left-aligned: a token's column is then its position, which is
what generation used, so that no model needs `position_ids` and a causal model never sees padding.

Refuses (ProbeError): shapes that differ, no generated token, a generated token that is masked out or has no
predecessor, a temperature that is not a positive number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from logra.errors import ProbeError

# Most padded tokens of one forward, so that the probe's activations do not grow with the number of responses. A response
# that is longer runs alone.
FORWARD_TOKENS = 2048


@dataclass(frozen=True)
class ProbeBatch:
    """The responses of one forward, left-aligned. n responses, w columns, t generated tokens.

    Attributes:
        input_ids: int64 [n, w].
        attention_mask: int64 [n, w], 1 at real tokens.
        rows: int64 [t], row of each generated token.
        columns: int64 [t], column whose logits predict that token (its own column minus one).
        num_counted: generated tokens whose KL counts, the first ones; None for all (see `logra.trust.lockstep`).
    """

    input_ids: Tensor
    attention_mask: Tensor
    rows: Tensor
    columns: Tensor
    num_counted: int | None = None

    @property
    def counted(self) -> int:
        """Number of generated tokens whose KL counts."""
        return self.columns.numel() if self.num_counted is None else self.num_counted


class KeptOutputs:
    """What the unchanged model returned on the probe, so that the check need not run again what the prediction has run.

    It holds for one model and one state of its weights: any in-place change of a parameter makes it void.

    Attributes:
        outputs: fp32 or wider, one per batch.
        by_itself: whether the model computes in fp32 or wider of its own accord.
    """

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.by_itself = False
        self._key: tuple[int, int] | None = None

    def keep(self, model: nn.Module, outputs: Sequence[Tensor], *, by_itself: bool) -> None:
        """Remember the outputs of the model as it is."""
        self.outputs, self.by_itself, self._key = list(outputs), by_itself, _state_of(model)

    def holds_for(self, model: nn.Module) -> bool:
        """Whether there are outputs, and the weights have not changed since."""
        return self._key == _state_of(model)


def _state_of(model: nn.Module) -> tuple[int, int]:
    return id(model), sum(parameter._version for parameter in model.parameters())


@dataclass(frozen=True)
class Probe:
    """Responses to measure on, made by `TrustRegion.make_probe`.

    Attributes:
        batches: what to run, one forward each.
        temperature: sampling temperature of the policy, > 0.
        num_responses: responses in all batches.
        num_tokens: generated tokens in all batches.
        selected: int64 [num_responses], rows of the training batch that were drawn, in the order of the batches.
        base: outputs of the unchanged model in fp32, kept from one measurement to the next.
    """

    batches: tuple[ProbeBatch, ...]
    temperature: float
    num_responses: int
    num_tokens: int
    selected: Tensor
    base: KeptOutputs = field(default_factory=KeptOutputs, compare=False, repr=False)


def check_probe_tensors(input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, temperature: float) -> None:
    """Raise ProbeError unless the tensors describe at least one generated token (see the module docstring)."""
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature > 0):
        raise ProbeError(f"temperature={temperature!r}: the probe needs a finite number > 0, the sampling temperature.")
    if input_ids.ndim != 2 or input_ids.is_floating_point():
        raise ProbeError(
            f"input_ids has shape {tuple(input_ids.shape)}, {input_ids.dtype}: integer [batch, tokens] needed."
        )
    for name, mask in (("attention_mask", attention_mask), ("loss_mask", loss_mask)):
        if mask.shape != input_ids.shape:
            raise ProbeError(
                f"{name} has shape {tuple(mask.shape)}: it must equal that of input_ids, {tuple(input_ids.shape)}."
            )
        if not ((mask == 0) | (mask == 1)).all():
            raise ProbeError(f"{name} has values other than 0 and 1.")
    generated, attended = loss_mask.bool(), attention_mask.bool()
    if not generated.any():
        raise ProbeError("loss_mask has no 1: the probe needs at least one generated token.")
    if (generated & ~attended).any():
        row, column = (generated & ~attended).nonzero()[0].tolist()
        raise ProbeError(
            f"loss_mask is 1 at row {row}, column {column}, where attention_mask is 0: mask it out in both."
        )
    predecessor = torch.zeros_like(attended)
    predecessor[:, 1:] = attended[:, :-1]
    if (generated & ~predecessor).any():
        row, column = (generated & ~predecessor).nonzero()[0].tolist()
        raise ProbeError(
            f"loss_mask is 1 at row {row}, column {column}, which has no attended token before it: "
            "the first token of a row is given, not generated."
        )


def select_responses(
    num_generated: Tensor, *, min_responses: int, min_tokens: int, generator: torch.Generator
) -> list[int]:
    """Rows drawn at random without replacement until both minima are met, or all rows with generated tokens.

    Args:
        num_generated: int64 [batch], generated tokens of each row (already capped).
        min_responses: responses wanted.
        min_tokens: generated tokens wanted.
        generator: the only source of randomness; a CPU generator.

    Returns:
        Row indices in the order drawn. Rows without generated tokens are passed over.
    """
    counts = num_generated.tolist()
    chosen: list[int] = []
    num_tokens = 0
    for row in torch.randperm(len(counts), generator=generator).tolist():
        if len(chosen) >= min_responses and num_tokens >= min_tokens:
            break
        if counts[row]:
            chosen.append(row)
            num_tokens += counts[row]
    return chosen


def build_probe(
    input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    *,
    temperature: float,
    min_responses: int,
    min_tokens: int,
    max_response_tokens: int,
    generator: torch.Generator,
) -> Probe:
    """Check, draw, cut and left-align.

    A response keeps its first `max_response_tokens` generated tokens; what follows the last kept one is dropped, since a
    causal model's earlier logits do not depend on it. Responses are sorted by length, so that little padding remains.

    Args:
        input_ids: integer [batch, tokens].
        attention_mask: [batch, tokens], 1 at real tokens.
        loss_mask: [batch, tokens], 1 at generated tokens.
        temperature: sampling temperature, > 0.
        min_responses: draw at least this many responses, if there are as many.
        min_tokens: draw until at least this many generated tokens are covered, if there are as many.
        max_response_tokens: cap of generated tokens per response.
        generator: CPU generator that draws the responses.

    Returns:
        The probe, on the device of `input_ids`.

    Raises:
        ProbeError: see the module docstring.
    """
    check_probe_tensors(input_ids, attention_mask, loss_mask, temperature)
    generated = loss_mask.bool()
    generated = generated & (generated.long().cumsum(dim=1) <= max_response_tokens)
    chosen = select_responses(
        generated.sum(dim=1), min_responses=min_responses, min_tokens=min_tokens, generator=generator
    )
    responses = [_cut(input_ids[row], attention_mask[row].bool(), generated[row]) for row in chosen]
    order = sorted(range(len(chosen)), key=lambda index: responses[index][0].numel())
    batches = []
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * responses[order[stop]][0].numel() <= FORWARD_TOKENS:
            stop += 1
        batches.append(_stack([responses[index] for index in order[start:stop]]))
        start = stop
    return Probe(
        batches=tuple(batches),
        temperature=float(temperature),
        num_responses=len(chosen),
        num_tokens=sum(batch.columns.numel() for batch in batches),
        selected=torch.tensor([chosen[index] for index in order]),
    )


def _cut(input_ids: Tensor, attended: Tensor, generated: Tensor) -> tuple[Tensor, Tensor]:
    """One row [tokens] without padding and without what follows its last generated token: (ids, generated), [length]."""
    last = int(generated.nonzero().max())
    keep = attended.clone()
    keep[last + 1 :] = False
    return input_ids[keep].long(), generated[keep]


def _stack(responses: list[tuple[Tensor, Tensor]]) -> ProbeBatch:
    """Left-aligned rows. The id under the padding is 0: any valid id will do, no earlier token attends to it."""
    device = responses[0][0].device
    shape = (len(responses), max(ids.numel() for ids, _ in responses))
    input_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    attention_mask = torch.zeros_like(input_ids)
    generated = torch.zeros(shape, dtype=torch.bool, device=device)
    for row, (ids, flags) in enumerate(responses):
        input_ids[row, : ids.numel()] = ids
        attention_mask[row, : ids.numel()] = 1
        generated[row, : ids.numel()] = flags
    rows, columns = generated.nonzero(as_tuple=True)
    return ProbeBatch(input_ids, attention_mask, rows, columns - 1)
