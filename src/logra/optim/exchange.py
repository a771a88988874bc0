"""What the processes of a step agree on: the norm of the weights, and the integers of an update.

Every process recovers the same gradient from the reduced sketches, so all of them hold the same proposals up to what
their hardware rounds. The integers that are applied must be equal to the bit: layer i is rounded on process
i mod world size alone, and its factors are broadcast (about 1 byte per entry of a factor).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from logra import distributed
from logra.errors import LograError
from logra.optim.layer import Proposal
from logra.shards import is_sharded
from logra.sketch.targets import Target
from logra.update import LowRankUpdate


def weight_norms(targets: Sequence[Target]) -> Tensor:
    """Frobenius norm of every target's whole weight, fp32 [targets]; of shards, the root of the sum over processes."""
    # fp64, so that the number of parts leaves fp32 bits alone: a run can go on with another number of processes.
    squares = torch.stack([torch.linalg.vector_norm(target.weight, dtype=torch.float64).square() for target in targets])
    if distributed.num_processes() > 1 and any(is_sharded(target.parameter) for target in targets):
        # Each part of a weight is summed as often as it is stored.
        copies = [distributed.num_processes() // target.sharding.num_holders for target in targets]
        distributed.sum_(squares.div_(squares.new_tensor(copies)))
    return squares.sqrt().float()


def rounded_once(
    proposals: Mapping[str, Proposal], round_one: Callable[[str], LowRankUpdate], *, factor_bits: int, decay: float
) -> dict[str, LowRankUpdate]:
    """Round every layer on one process, and hand its integers to all.

    Args:
        proposals: by fully qualified name, of the same names, shapes and ranks on all processes.
        round_one: rounds the proposal of a name.
        factor_bits: of the integers.
        decay: of the updates.

    Raises:
        LograError: a proposal cannot be rounded; on all processes.
    """
    num_processes = distributed.num_processes()
    if num_processes == 1:
        return {fqn: round_one(fqn) for fqn in proposals}
    owners = {fqn: index % num_processes for index, fqn in enumerate(proposals)}
    updates: dict[str, LowRankUpdate] = {}
    error: LograError | None = None
    try:
        updates = {fqn: round_one(fqn) for fqn, owner in owners.items() if owner == distributed.rank()}
    except LograError as own_error:
        error = own_error
    if distributed.any_process([error is not None])[0]:
        raise error or LograError("another process could not round its part of the update; its error says why")
    for source in range(num_processes):
        names = [fqn for fqn, owner in owners.items() if owner == source]
        if source != distributed.rank():
            updates |= {fqn: _blank(proposals[fqn], factor_bits, decay) for fqn in names}
        if names:
            flat = torch.cat([field.view(torch.uint8) for fqn in names for field in _fields(updates[fqn]).values()])
            distributed.broadcast_(flat, source)
            if source != distributed.rank():
                updates |= _refilled({fqn: updates[fqn] for fqn in names}, flat)
    return {fqn: updates[fqn] for fqn in proposals}


def _blank(proposal: Proposal, factor_bits: int, decay: float) -> LowRankUpdate:
    """An update of zeros with the shapes of the proposal's."""
    given = proposal.out_factor if proposal.out_factor is not None else proposal.in_factor
    assert given is not None
    (num_out, num_in), rank = proposal.shape, given.shape[1] if given is proposal.out_factor else given.shape[0]

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=given.device)

    return LowRankUpdate(
        shape=proposal.shape,
        rank=rank,
        factor_bits=factor_bits,
        factor_out=None if proposal.out_factor is None else zeros(num_out, rank, dtype=torch.int8),
        factor_in=None if proposal.in_factor is None else zeros(rank, num_in, dtype=torch.int8),
        exponent_out=zeros(num_out, dtype=torch.int16),
        exponent_in=zeros(num_in, dtype=torch.int16),
        signs=proposal.signs,
        decay=torch.tensor(decay, dtype=torch.float32).item(),
    )


def _fields(update: LowRankUpdate) -> dict[str, Tensor]:
    """The tensors of an update, flat and contiguous."""
    return {name: value.contiguous().flatten() for name, value in vars(update).items() if isinstance(value, Tensor)}


def _refilled(updates: Mapping[str, LowRankUpdate], flat: Tensor) -> dict[str, LowRankUpdate]:
    """The updates with their tensors taken from the bytes of all of them, uint8 [bytes], in the order of `_fields`."""
    filled, start = {}, 0
    for fqn, update in updates.items():
        tensors = {}
        for name, field in _fields(update).items():
            stop = start + field.numel() * field.element_size()
            # A copy, since a view as int16 must begin at an even byte.
            tensors[name] = flat[start:stop].clone().view(field.dtype).view(getattr(update, name).shape)
            start = stop
        filled[fqn] = replace(update, **tensors)
    return filled
