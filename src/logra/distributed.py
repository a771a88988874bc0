"""Reductions over data-parallel processes. Every function is the identity in a run of one process."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Of fp32 tensors that are reduced or broadcast together."""
_T = TypeVar("_T")


def num_processes() -> int:
    """Number of processes in the default group; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def replicas(num_users: int = 1) -> int:
    """Number of data-parallel replicas of a weight that `num_users` processes compute together."""
    return num_processes() // num_users


def average_(tensors: Sequence[Tensor], num_users: Sequence[int] | None = None, *, owner: int | None = None) -> None:
    """Replace tensors by their mean over data-parallel replicas, computed in fp32, in place.

    The mean, not the sum: that is what DistributedDataParallel and FSDP2 do with gradients. All processes must pass
    tensors of the same shapes in the same order. They are reduced in buckets of up to `BUCKET_BYTES`.

    Args:
        tensors: addends of this process.
        num_users: for every tensor, the number of processes (of tensor parallelism) whose addends make up one replica's
            value; None for 1.
        owner: the process that gets the mean, while those of others stay as they are; None for all processes.
    """
    if num_processes() == 1:
        return
    counts = [1] * len(tensors) if num_users is None else list(num_users)
    users = iter(counts)
    for bucket in _buckets(tensors):
        _average_bucket([(tensor, next(users)) for tensor in bucket], owner)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, in lists of up to `BUCKET_BYTES` in fp32, or of one tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and 4 * (size + tensor.numel()) > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _average_bucket(bucket: list[tuple[Tensor, int]], owner: int | None) -> None:
    tensors = [tensor for tensor, _ in bucket]
    flat = torch.cat([tensor.float().reshape(-1) for tensor in tensors])
    if owner is None:
        dist.all_reduce(flat)
    else:
        dist.reduce(flat, dst=owner)
        if owner != rank():
            return
    for (tensor, count), part in zip(bucket, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_((part / replicas(count)).view_as(tensor))


def sum_(tensor: Tensor) -> Tensor:
    """The sum over processes, in place, the same bits on all of them."""
    if num_processes() > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_(tensor: Tensor, source: int) -> Tensor:
    """Replace a tensor by that of the process `source`, in place."""
    if num_processes() > 1:
        dist.broadcast(tensor, src=source)
    return tensor


def broadcast_all_(tensors: Sequence[Tensor], source: int) -> None:
    """Replace fp32 tensors by those of the process `source`, in place, in buckets of up to `BUCKET_BYTES`.

    Args:
        tensors: of any layout, of the same shapes in the same order on all processes; those of `source` are only read.
        source: the process that has them.
    """
    if num_processes() == 1:
        return
    for bucket in _buckets(tensors):
        sizes = [tensor.numel() for tensor in bucket]
        if rank() == source:
            dist.broadcast(torch.cat([tensor.reshape(-1) for tensor in bucket]), src=source)
            continue
        flat = bucket[0].new_empty(sum(sizes))
        dist.broadcast(flat, src=source)
        for tensor, part in zip(bucket, flat.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))


def rank() -> int:
    """This process's number; 0 without torch.distributed."""
    return dist.get_rank() if num_processes() > 1 else 0


def is_fake() -> bool:
    """Whether the default group is torch's fake one, which traces a run of many processes in a single one.

    Its collectives leave tensors as they are, so that flags and numbers of other processes cannot be asked for.
    """
    return num_processes() > 1 and dist.get_backend() == "fake"


def any_process(flags: Sequence[bool]) -> list[bool]:
    """For every flag, whether it is set on at least one process."""
    if num_processes() == 1 or is_fake():
        return list(flags)
    values = torch.tensor([float(flag) for flag in flags], device=_device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [value > 0 for value in values.tolist()]


def mean(value: float, weight: float = 1.0) -> float:
    """Weighted mean of a number over processes, NaN on all of them if it is NaN on one or no weight is positive.

    Args:
        value: this process's number; does not count where the weight is 0.
        weight: of this process, at least 0.
    """
    if num_processes() == 1 or is_fake():
        return value
    totals = torch.tensor([value * weight if weight > 0 else 0.0, weight], dtype=torch.float64, device=_device())
    dist.all_reduce(totals)
    total, weights = totals.tolist()
    return total / weights if weights > 0 else float("nan")


def largest(values: Sequence[int]) -> list[int]:
    """The element-wise maximum over processes."""
    if num_processes() == 1 or is_fake() or not values:
        return list(values)
    tensor = torch.tensor(values, device=_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def gathered(value: _T) -> list[_T]:
    """A plain value (no tensor) of every process, by their numbers, on all of them."""
    if num_processes() == 1:
        return [value]
    values: list[Any] = [None] * num_processes()
    dist.all_gather_object(values, value)
    return values


def from_leader(action: Callable[[], _T]) -> _T:
    """What an action returns on process 0, where alone it runs, on all of them; not for tensors."""
    if num_processes() == 1:
        return action()
    result: list[Any] = [action() if rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def _device() -> torch.device:
    """Where small tensors of the default group must lie."""
    on_cpu = "cpu:" in str(dist.get_backend_config())
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
