"""What every process knows of a gradient and a proposal that another one has: shapes, signs and scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from logra.optim.layer import LayerGradient, Proposal
from logra.sketch.capture import Capture
from logra.sketch.targets import Target
from logra.update import LowRankUpdate, SignFactor


@dataclass(frozen=True)
class Frame:
    """The outline of one target's step.

    Attributes:
        shape: (out, in).
        rank: of the sketches.
        signs: the projection of a single sketch; None where both sides are sketched.
        exponents: log2 of the input scales s, integers [in]; None means s = 1.
        device: of the factors.
    """

    shape: tuple[int, int]
    rank: int
    signs: SignFactor | None
    exponents: Tensor | None
    device: torch.device

    @classmethod
    def of(cls, capture: Capture, target: Target) -> "Frame":
        """That of a target in the present window."""
        return cls(
            (target.out_features, target.in_features),
            capture.spec.rank,
            capture.single_signs(target.fqn),
            capture.exponents(target.fqn),
            target.parameter.device,
        )

    @property
    def proposal_rank(self) -> int:
        """Columns of the proposal's out factor: of two sides, no more than the weight has rows or columns."""
        return self.rank if self.signs is not None else min(self.rank, *self.shape)

    def blank_gradient(self, norm: Tensor) -> LayerGradient:
        """A recovered gradient of this outline to be filled in."""
        num_out, num_in = self.shape
        if self.signs is not None:
            rows = num_out if self.signs.side == "in" else num_in
            sketch = self._empty(rows, self.rank)
            return LayerGradient(norm=norm, sketch=sketch, signs=self.signs, exponents=self.exponents)
        rank = min(self.rank, num_out)
        return LayerGradient(
            norm=norm, q=self._empty(num_out, rank), r=self._empty(rank, num_in), exponents=self.exponents
        )

    def blank_proposal(self) -> Proposal:
        """A proposal of this outline to be filled in."""
        (num_out, num_in), rank = self.shape, self.proposal_rank
        on_in = self.signs is not None and self.signs.side == "in"
        on_out = self.signs is not None and not on_in
        return Proposal(
            None if on_out else self._empty(num_out, rank),
            None if on_in else self._empty(rank, num_in),
            self.signs,
            self.exponents if on_in else None,
            self.shape,
        )

    def blank_update(self, factor_bits: int, decay: float) -> LowRankUpdate:
        """An update of this outline, of zeros."""
        (num_out, num_in), rank = self.shape, self.proposal_rank
        on_in = self.signs is not None and self.signs.side == "in"
        on_out = self.signs is not None and not on_in

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return LowRankUpdate(
            shape=self.shape,
            rank=rank,
            factor_bits=factor_bits,
            factor_out=None if on_out else zeros(num_out, rank, dtype=torch.int8),
            factor_in=None if on_in else zeros(rank, num_in, dtype=torch.int8),
            exponent_out=zeros(num_out, dtype=torch.int16),
            exponent_in=zeros(num_in, dtype=torch.int16),
            signs=self.signs,
            decay=torch.tensor(decay, dtype=torch.float32).item(),
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device)
