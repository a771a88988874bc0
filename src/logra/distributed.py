"""Reductions over data-parallel processes. Every function is the identity in a run of one process."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def num_processes() -> int:
    """Number of processes in the default group; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def average_(tensors: Sequence[Tensor]) -> None:
    """Replace fp32 tensors by their mean over processes, in place, with one collective.

    The mean, not the sum: that is what DistributedDataParallel does with gradients. All processes must pass tensors of
    the same shapes in the same order.
    """
    if num_processes() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= num_processes()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def mean(value: float) -> float:
    """Mean of a number over processes; NaN on all of them if it is NaN on one."""
    if num_processes() == 1:
        return value
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / num_processes()
