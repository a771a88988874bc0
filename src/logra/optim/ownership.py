"""Which process recovers a target's gradient and keeps its moments.

Every target has one owner. It alone gets the reduced sketches, recovers the gradient, holds momentum and second moments,
and proposes; the others get numbers (norms), the factors that the trust region prices, and the rounded update. A process
that is alone owns all.

Contract: which process owns what is a function of the targets' order and sizes and of the number of processes alone.
"""

import heapq
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from logra import distributed
from logra.optim.state import drop_moments, moments
from logra.sketch.targets import Target


def owners(targets: Sequence[Target], num_processes: int) -> dict[str, int]:
    """The owner of every target by fully qualified name: the largest first, each to the process that has least so far.

    Args:
        targets: all of an optimizer, also those that do not move in a step. A target counts with the entries of its
            factors for a rank of one.
        num_processes: to share them out to.
    """
    sizes = [target.out_features + target.in_features for target in targets]
    return dict(zip((target.fqn for target in targets), shared_out(sizes, num_processes), strict=True))


def shared_out(sizes: Sequence[int], num_processes: int) -> list[int]:
    """A process for each of the sizes, see `owners`."""
    loads = [(0, process) for process in range(num_processes)]
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable: equal ones in their order
        load, found[index] = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[index], found[index]))
    # Process 0 has most: what is true of it, in a plan for one, holds for all.
    by_load = {process: rank for rank, (_, process) in enumerate(sorted(loads, key=lambda load: (-load[0], load[1])))}
    return [by_load[process] for process in found]


def own_targets(targets: Sequence[Target]) -> list[Target]:
    """Those that this process owns."""
    owner_of = owners(targets, distributed.num_processes())
    return [target for target in targets if owner_of[target.fqn] == distributed.rank()]


def drop_others(targets: Sequence[Target], state: Mapping[Any, MutableMapping[str, Any]]) -> None:
    """Remove the moments of targets that other processes own, in place (a state that was loaded whole has them).

    Args:
        targets: all of the optimizer.
        state: parameter -> its optimizer state.
    """
    own = {target.fqn for target in own_targets(targets)}
    for target in targets:
        if target.fqn not in own and target.parameter in state:
            drop_moments(state[target.parameter])


@contextmanager
def whole_on_leader(targets: Sequence[Target], state: MutableMapping[Any, MutableMapping[str, Any]]) -> Iterator[None]:
    """Inside, process 0 has the moments of all targets, those of the others' on the CPU. All processes enter it together."""
    if distributed.num_processes() == 1:
        yield
        return
    drop_others(targets, state)
    own = {target.fqn: moments(state.get(target.parameter, {})) for target in own_targets(targets)}
    described = distributed.gathered({fqn: _described(values) for fqn, values in own.items()})
    parameters = {target.fqn: target.parameter for target in targets}
    for source, held in enumerate(described[1:], start=1):
        for fqn, values in held.items():
            for name, value in values.items():
                is_tensor, parameter = isinstance(value, _Outline), parameters[fqn]
                if distributed.rank() == source and is_tensor:
                    dist.send(own[fqn][name].contiguous(), dst=0)
                elif distributed.rank() == 0:
                    state[parameter][name] = _received(value, source, parameter.device) if is_tensor else value
    try:
        yield
    finally:
        drop_others(targets, state)


class _Outline(NamedTuple):
    """Of a tensor that another process holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _Outline(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def _received(outline: _Outline, source: int, device: torch.device) -> Tensor:
    buffer = torch.empty(outline.shape, dtype=outline.dtype, device=device)
    dist.recv(buffer, src=source)
    return buffer.cpu()
