"""The exact change of a small-step float tensor: what AdamW does to a parameter, in a fraction of its bits.

Floats of one dtype are numbered in their order: with the bits of a value as a signed integer b of the same width,

    number(b) = b if b >= 0, else b with all bits but the sign flipped

A delta is number(new) - number(old) modulo 2^bits, element by element: small where the value moved by a few units in
its last place, zero where it did not move. Adding it to number(old) gives the bits of the new value back, whatever they
are (NaN, infinities, negative zeros). On the wire its elements are zigzag-coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...)
and split into byte planes, of which the high ones are zeros that cost nothing.

Contract: whoever applies a delta holds the old bits. From an old value that is off by some numbers, the new one is off
by as many. Refuses, with `LograError`, dtypes without this order and shapes that differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from logra.errors import LograError

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
DELTA_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What tensors can travel as deltas, by the names that packets use."""


@dataclass(frozen=True, eq=False)
class TensorDelta:
    """The exact change of one tensor.

    Attributes:
        dtype: of the tensor: float32, bfloat16 or float16.
        difference: number(new) - number(old), int32 or int16 as wide as `dtype`, in the shape of the tensor.

    Raises:
        LograError: a dtype that is not allowed, or integers of another width.
    """

    dtype: torch.dtype
    difference: Tensor

    def __post_init__(self) -> None:
        expected = _INTEGERS.get(self.dtype)
        if expected is None or self.difference.dtype != expected:
            raise LograError(
                f"TensorDelta: a difference in {self.difference.dtype} for {self.dtype}; allowed are {_INTEGERS}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.difference.shape)

    @staticmethod
    @torch.no_grad()
    def between(old: Tensor, new: Tensor) -> "TensorDelta":
        """The delta that leads from one value of a tensor to another.

        Args:
            old: float32, bfloat16 or float16, any shape.
            new: of the same dtype, shape and device.

        Raises:
            LograError: another dtype, or tensors that differ in dtype or shape.
        """
        if old.dtype != new.dtype or old.shape != new.shape or old.dtype not in _INTEGERS:
            raise LograError(
                f"TensorDelta: from {old.dtype} {tuple(old.shape)} to {new.dtype} {tuple(new.shape)}; allowed are equal "
                f"shapes and one of {list(_INTEGERS)}"
            )
        # Integer subtraction wraps, which is arithmetic modulo 2^bits.
        return TensorDelta(old.dtype, _numbers(new.detach()) - _numbers(old.detach()))

    @torch.no_grad()
    def applied(self, old: Tensor) -> Tensor:
        """The new value from the old one, bit for bit.

        Args:
            old: of the dtype and shape of the delta, on its device.
        """
        if old.dtype != self.dtype or tuple(old.shape) != self.shape:
            raise LograError(f"TensorDelta: needs {self.dtype} {self.shape}, got {old.dtype} {tuple(old.shape)}")
        return _ordered(_numbers(old) + self.difference).view(self.dtype)

    def planes(self) -> Tensor:
        """The wire form, uint8 [bytes of an element, *shape], on the CPU: plane 0 holds the lowest bytes."""
        value = self.difference.cpu().contiguous()
        bits = 8 * value.element_size()
        zigzag = ((value << 1) ^ (value >> (bits - 1))).reshape(-1, 1)
        return zigzag.view(torch.uint8).T.contiguous().view(value.element_size(), *value.shape)

    @staticmethod
    def from_planes(dtype: torch.dtype, planes: Tensor) -> "TensorDelta":
        """The delta of a wire form.

        Raises:
            LograError: planes that are no uint8, or not as many as an element has bytes.
        """
        integers = _INTEGERS.get(dtype)
        if integers is None or planes.dtype != torch.uint8 or planes.ndim < 1 or planes.shape[0] != dtype.itemsize:
            raise LograError(f"TensorDelta: {planes.dtype} {tuple(planes.shape)} are no byte planes of {dtype}")
        zigzag = torch.stack(tuple(planes.reshape(dtype.itemsize, -1)), dim=1).view(integers).view(planes.shape[1:])
        # A shift of signed integers copies the sign; the bit that it must not copy is masked away.
        logical = (zigzag >> 1) & torch.iinfo(integers).max
        return TensorDelta(dtype, logical ^ -(zigzag & 1))


def _numbers(value: Tensor) -> Tensor:
    return _ordered(value.contiguous().view(_INTEGERS[value.dtype]))


def _ordered(bits: Tensor) -> Tensor:
    """From bits to numbers, and back: the map is its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
