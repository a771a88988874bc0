"""Frobenius norms in fp64: squares of weights and gradients may leave the range of fp32."""

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**19
"""Numbers whose fp64 copies exist at once on a CPU, 4 MiB."""


def norm64(tensor: Tensor) -> Tensor:
    """‖tensor‖_F, fp64 scalar.

    Args:
        tensor: floating point, any shape; no DTensor.
    """
    if tensor.is_cuda:
        return torch.linalg.vector_norm(tensor, dtype=torch.float64)
    # On a CPU `vector_norm` makes an fp64 copy of everything, which takes twice its memory and most of the time.
    if tensor.ndim == 2 and not tensor.is_contiguous():
        tensor = tensor.T
    numbers = tensor.reshape(-1)
    buffer = torch.empty(min(_BLOCK_ELEMENTS, numbers.numel()), dtype=torch.float64, device=tensor.device)
    blocks = numbers.split(_BLOCK_ELEMENTS)
    norms = [torch.linalg.vector_norm(buffer[: block.numel()].copy_(block)) for block in blocks]
    return torch.linalg.vector_norm(torch.stack(norms))
