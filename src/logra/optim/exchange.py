"""What the processes of a step tell each other about the targets that each of them owns (`logra.optim.ownership`).

Numbers (norms) are summed with the zeros of those that do not have them, so that all get the owner's bits. Tensors are
broadcast by their owner. What decides over the step, and the integers that are applied, is thus equal to the bit everywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from logra import distributed
from logra.errors import LograError
from logra.optim.frame import Frame
from logra.optim.layer import LayerGradient, Proposal
from logra.optim.norms import norm64
from logra.shards import is_sharded
from logra.sketch.targets import Target
from logra.update import LowRankUpdate

_T = TypeVar("_T")


def weight_norms(targets: Sequence[Target]) -> Tensor:
    """Frobenius norm of every target's whole weight, fp32 [targets]; of shards, the root of the sum over processes."""
    # fp64, so that the number of parts leaves fp32 bits alone: a run can go on with another number of processes.
    squares = torch.stack([norm64(target.weight).square() for target in targets])
    if distributed.num_processes() > 1 and any(is_sharded(target.parameter) for target in targets):
        # Each part of a weight is summed as often as it is stored.
        copies = [distributed.num_processes() // target.sharding.num_holders for target in targets]
        distributed.sum_(squares.div_(squares.new_tensor(copies)))
    return squares.sqrt().float()


def for_each(names: Sequence[str], action: Callable[[str], _T], what: str) -> dict[str, _T]:
    """The action's result for every name that this process owns. If it fails on one process, all of them raise.

    Args:
        names: of this process.
        action: without collectives.
        what: it does to a part of the update, for the error.

    Raises:
        Exception: the action did on this process, whatever it is: one that is out of memory must not leave others waiting.
        LograError: it did on another process.
    """
    found: dict[str, _T] = {}
    error: Exception | None = None
    try:
        for name in names:
            found[name] = action(name)
    except Exception as own_error:
        error = own_error
    if distributed.any_process([error is not None])[0]:
        raise error or LograError(f"another process could not {what} its part of the update; its error says why")
    return found


def numbers_of_all(own: Mapping[str, Tensor], names: Sequence[str], device: torch.device) -> Tensor:
    """One number of every name, fp32 [names], the same bits on all processes.

    Args:
        own: fp32 scalars of the names that this process owns.
        names: of all processes, the same on all.
        device: of the result.
    """
    numbers = torch.stack([own[name] if name in own else torch.zeros((), device=device) for name in names])
    return distributed.sum_(numbers)


def proposals_of_all(
    own: Mapping[str, Proposal], frames: Mapping[str, Frame], owner_of: Mapping[str, int]
) -> dict[str, Proposal]:
    """The factors of all proposals, fp32; own ones are not copied, and the others' come without state.

    Args:
        own: of this process.
        frames: of all that move.
        owner_of: process by fully qualified name.
    """
    _check_own(own, frames, owner_of)
    found = {fqn: own[fqn] if fqn in own else frame.blank_proposal() for fqn, frame in frames.items()}
    _hand_out({fqn: (proposal.out_factor, proposal.in_factor) for fqn, proposal in found.items()}, owner_of)
    return found


def gradients_of_all(
    own: Mapping[str, LayerGradient],
    norms: Mapping[str, Tensor],
    frames: Mapping[str, Frame],
    owner_of: Mapping[str, int],
) -> dict[str, LayerGradient]:
    """The recovered gradients of all targets in factors, for those who measure a step.

    Args:
        own: of this process.
        norms: of all.
        frames: of all that move.
        owner_of: process by fully qualified name.
    """
    _check_own(own, frames, owner_of)
    found = {fqn: own[fqn] if fqn in own else frame.blank_gradient(norms[fqn]) for fqn, frame in frames.items()}
    _hand_out({fqn: (gradient.sketch, gradient.q, gradient.r) for fqn, gradient in found.items()}, owner_of)
    return found


def _check_own(own: Mapping[str, object], names: Iterable[str], owner_of: Mapping[str, int]) -> None:
    """An owner that has lost its part would hand out memory that nobody has written."""
    rank = distributed.rank()
    assert all(fqn in own for fqn in names if owner_of[fqn] == rank), "an owner lacks a target of its own"


def _hand_out(factors: Mapping[str, Sequence[Tensor | None]], owner_of: Mapping[str, int]) -> None:
    """Fill in the factors of others, one owner after the other."""
    for source in range(distributed.num_processes()):
        theirs = [factor for fqn in factors if owner_of[fqn] == source for factor in factors[fqn] if factor is not None]
        distributed.broadcast_all_(theirs, source)


def updates_of_all(
    frames: Mapping[str, Frame],
    owner_of: Mapping[str, int],
    round_one: Callable[[str], LowRankUpdate],
    *,
    factor_bits: int,
    decay: float,
) -> dict[str, LowRankUpdate]:
    """Round every layer on its owner, and hand its integers to all (about 1 byte per entry of a factor).

    Args:
        frames: of all that move, in the same order on all processes.
        owner_of: process by fully qualified name.
        round_one: rounds the proposal of a name that this process owns.
        factor_bits: of the integers.
        decay: of the updates.

    Raises:
        LograError: a proposal cannot be rounded; on all processes.
    """
    rank = distributed.rank()
    updates = for_each([fqn for fqn in frames if owner_of[fqn] == rank], round_one, "round")
    for source in range(distributed.num_processes() if distributed.num_processes() > 1 else 0):
        names = [fqn for fqn in frames if owner_of[fqn] == source]
        if source != rank:
            updates |= {fqn: frames[fqn].blank_update(factor_bits, decay) for fqn in names}
        if names:
            flat = torch.cat([field.view(torch.uint8) for fqn in names for field in _fields(updates[fqn]).values()])
            distributed.broadcast_(flat, source)
            if source != rank:
                updates |= _refilled({fqn: updates[fqn] for fqn in names}, flat)
    return {fqn: updates[fqn] for fqn in frames}


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
