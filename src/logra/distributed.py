"""Reductions over data-parallel processes. Every function is the identity in a run of one process."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def num_processes() -> int:
    """Number of processes in the default group; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def average_(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their mean over processes, computed in fp32, in place, with one collective.

    The mean, not the sum: that is what DistributedDataParallel does with gradients. All processes must pass tensors of
    the same shapes in the same order.
    """
    if num_processes() == 1 or not tensors:
        return
    flat = torch.cat([tensor.float().reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= num_processes()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def any_process(flags: Sequence[bool]) -> list[bool]:
    """For every flag, whether it is set on at least one process."""
    if num_processes() == 1:
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
    if num_processes() == 1:
        return value
    totals = torch.tensor([value * weight if weight > 0 else 0.0, weight], dtype=torch.float64, device=_device())
    dist.all_reduce(totals)
    total, weights = totals.tolist()
    return total / weights if weights > 0 else float("nan")


def _device() -> torch.device:
    """Where small tensors of the default group must lie."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
