"""Frobenius norms of weights and gradients, in fp64, whose squares may leave the range of fp32."""

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**18
"""Converted at once on a CPU, which takes a seventh of the time of a reduction that converts number by number."""


def norm64(matrix: Tensor) -> Tensor:
    """‖matrix‖_F, fp64 scalar.

    Args:
        matrix: any dtype and shape; not a DTensor.
    """
    if matrix.is_cuda or matrix.ndim == 0:
        return torch.linalg.vector_norm(matrix, dtype=torch.float64)
    if matrix.ndim == 2 and matrix.stride(0) < matrix.stride(1):
        matrix = matrix.T  # a block is then contiguous
    rows = max(1, _BLOCK_ELEMENTS // max(1, matrix[:1].numel()))
    buffer = torch.empty((rows, *matrix.shape[1:]), dtype=torch.float64)
    blocks = matrix.split(rows)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(buffer[: len(block)].copy_(block)) for block in blocks])
    )
