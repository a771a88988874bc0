"""Probes of one size: under FSDP2 a forward is a collective, so that all processes must run the same number of them.

Processes have probes of different sizes, or none. `in_step` fills a probe up to the largest: with stand-in batches of two
padding tokens, and with repeated tokens where another process reads more chunks of logits. What is filled in runs, and
does not count.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from logra import distributed
from logra.shards import is_fsdp
from logra.trust.forward import CHUNK_TOKENS, token_chunks
from logra.trust.probe import KeptOutputs, Probe, ProbeBatch


def in_step(model: nn.Module, probe: Probe | None) -> Probe | None:
    """The probe, filled up where other processes have more to run; itself where forwards are no collectives.

    A collective of all processes. Without FSDP2, a process without a probe keeps None.
    """
    if distributed.num_processes() == 1 or not is_fsdp(model):
        return probe
    batches = () if probe is None else probe.batches
    own = [len(list(token_chunks(batch))) for batch in batches]
    (num_batches,) = distributed.largest([len(own)])
    if num_batches == 0:
        return None
    num_chunks = distributed.largest(own + [0] * (num_batches - len(own)))
    stand_in = _stand_in(batches[0].input_ids.device if batches else next(model.parameters()).device)
    filled = (*batches, *[stand_in] * (num_batches - len(batches)))
    filled = tuple(_with_chunks(batch, count) for batch, count in zip(filled, num_chunks, strict=True))
    if probe is None:
        # The temperature of what does not count is arbitrary.
        return Probe(filled, temperature=1.0, num_responses=0, num_tokens=0, selected=torch.empty(0, dtype=torch.int64))
    return replace(probe, batches=filled, base=KeptOutputs())  # kept nowhere: whether to run again would differ


def _stand_in(device: torch.device) -> ProbeBatch:
    """One row of two tokens, of which none counts. Token 0 exists in every vocabulary."""
    row = torch.zeros(1, 2, dtype=torch.int64, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    return ProbeBatch(row, torch.ones_like(row), first, first, num_counted=0)


def _with_chunks(batch: ProbeBatch, num_chunks: int) -> ProbeBatch:
    """The batch with its first generated token repeated until reading it takes `num_chunks` chunks."""
    missing = (num_chunks - 1) * CHUNK_TOKENS + 1 - batch.columns.numel()
    if missing <= 0:
        return batch

    def repeated(index: Tensor) -> Tensor:
        return torch.cat([index, index[:1].expand(missing)])

    rows, columns = repeated(batch.rows), repeated(batch.columns)
    return replace(batch, rows=rows, columns=columns, num_counted=batch.counted)
