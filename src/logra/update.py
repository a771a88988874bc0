"""The update that everything else passes around: the rounded change of one weight, and all changes of one step.

A weight W [out, in] changes by

    dW = diag(2^exponent_out) · L · R · diag(2^exponent_in),      W <- fl(fl(W * decay) - dW)

with integers L [out, r] and R [r, in] (or one of them the ±1 signs of a seed). |L|, |R| <= 127 and r <= 1024 keep every
partial sum of the product below 2^24, so fp32 holds it exactly in whatever order it is summed; the powers of two lie
where they neither overflow nor reach denormal numbers. dW is therefore the same bits on every device, kernel and shard,
and the merge rounds once (twice with weight decay), element by element: trainer and replicas agree bit for bit.

Contract: updates are immutable values; nobody writes into their tensors. Refuses, with `LograError`, factors outside
these ranges, and with `PacketError` weights that an update does not fit.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from logra.contracts import Delta
from logra.errors import LograError, PacketError
from logra.hashing import Range, check_range, derive_key
from logra.merge_rule import WEIGHT_STORAGES
from logra.rounding import MAX_EXPONENT, MIN_EXPONENT, powers_of_two, qmax_of, round_slices
from logra.sign_factor import SignFactor
from logra.tensor_delta import TensorDelta

MAX_RANK = 1024
_BLOCK_ELEMENTS = 2**20  # 4 MiB of fp32: what a merge holds besides the weight
_MIN_BLOCKS = 4  # also of a small weight, a merge never holds the whole change
_TEXT_FIELDS = {"run_id": "[!-~]{0,128}", "weights_digest": "[0-9a-f]{64}", "weight_storage": "|".join(WEIGHT_STORAGES)}


@dataclass(frozen=True, eq=False)
class LowRankUpdate:
    """The rounded change of one weight, W <- fl(fl(W * decay) - dW).

    Attributes:
        shape: (out, in) of the canonical weight.
        rank: r, in [1, 1024].
        factor_bits: 4 (integers in [-7, 7]) or 8 (integers in [-127, 127]).
        factor_out: L, int8 [out, r]; None where `signs` stands for it.
        factor_in: R, int8 [r, in]; None where `signs` stands for it.
        exponent_out: int16 [out], in [-60, 50]: row i of dW is scaled by 2**exponent_out[i].
        exponent_in: int16 [in], in [-60, 50]: column j of dW is scaled by 2**exponent_in[j].
        signs: stands for the one factor that is None; None where both are given.
        decay: multiplies the weight before the subtraction; in (0, 1] and exactly an fp32 number. 1.0 means none.

    Raises:
        LograError: a field with a shape, dtype or value that is not allowed.
    """

    shape: tuple[int, int]
    rank: int
    factor_bits: int
    factor_out: Tensor | None
    factor_in: Tensor | None
    exponent_out: Tensor
    exponent_in: Tensor
    signs: SignFactor | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise LograError(f"LowRankUpdate.shape is {self.shape}; allowed are two sizes of at least 1")
        if not 1 <= self.rank <= MAX_RANK:
            raise LograError(f"LowRankUpdate.rank is {self.rank}; allowed is 1 to {MAX_RANK}")
        if not (0.0 < self.decay <= 1.0 and torch.tensor(self.decay, dtype=torch.float32).item() == self.decay):
            raise LograError(f"LowRankUpdate.decay is {self.decay!r}; allowed are the fp32 numbers in (0, 1]")
        qmax = qmax_of(self.factor_bits)
        num_out, num_in = self.shape
        self._check_sides()
        if self.factor_out is not None:
            _check_integers("factor_out", self.factor_out, torch.int8, (num_out, self.rank), -qmax, qmax)
        if self.factor_in is not None:
            _check_integers("factor_in", self.factor_in, torch.int8, (self.rank, num_in), -qmax, qmax)
        _check_integers("exponent_out", self.exponent_out, torch.int16, (num_out,), MIN_EXPONENT, MAX_EXPONENT)
        _check_integers("exponent_in", self.exponent_in, torch.int16, (num_in,), MIN_EXPONENT, MAX_EXPONENT)

    def _check_sides(self) -> None:
        missing = [side for side, factor in (("out", self.factor_out), ("in", self.factor_in)) if factor is None]
        expected = [] if self.signs is None else [self.signs.side]
        if missing != expected:
            raise LograError(
                f"LowRankUpdate: factors missing on sides {missing}, signs given for {expected}; "
                "exactly the factor that `signs` stands for must be None"
            )

    def to(self, device: torch.device | str) -> "LowRankUpdate":
        """The same update with its tensors on `device`; itself where they are there already."""
        device = torch.device(device)
        if self.exponent_out.device == device:
            return self
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    @torch.no_grad()
    def dense(self, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        """dW, or a slice of it: what is subtracted from the (decayed) weight, exactly.

        Args:
            rows: half-open range of output features; None for all.
            columns: half-open range of input features; None for all.

        Returns:
            fp32 [rows, columns] on the device of the factors. Any slice equals the slice of the whole, bit for bit.
        """
        return _exact_product(self._scaled_out(rows), self._scaled_in(columns))

    @torch.no_grad()
    def delta(self) -> Delta:
        """The same change as fp32 factors with the powers of two folded in; both factors are exact."""
        return Delta(self._scaled_out(None), self._scaled_in(None), self.decay)

    @torch.no_grad()
    def apply_(
        self,
        weight: Tensor,
        rows: Range | None = None,
        columns: Range | None = None,
        block_rows: int | None = None,
    ) -> None:
        """Merge into a weight, or into a shard of it: W <- fl(fl(W * decay) - dW), one block of rows at a time.

        Args:
            weight: fp32 [rows, columns], changed in place; any strides, so the transposed view of a weight that is
                stored as [in, out] is fine.
            rows: half-open range of output features that `weight` holds; None for all.
            columns: half-open range of input features that `weight` holds; None for all.
            block_rows: rows merged at once, which sets the peak of extra memory and not the result;
                None for blocks of at most 4 MiB.

        Raises:
            PacketError: `weight` has another dtype or shape. Nothing has been written then.
        """
        row_start, row_stop = check_range("rows", rows, self.shape[0])
        column_start, column_stop = check_range("columns", columns, self.shape[1])
        expected = (row_stop - row_start, column_stop - column_start)
        if weight.dtype != torch.float32 or tuple(weight.shape) != expected:
            raise PacketError(
                f"apply_: weight is {weight.dtype} {tuple(weight.shape)}; this update needs torch.float32 {expected}"
            )
        for (start, stop), change in self.to(weight.device).changes(rows, columns, block_rows):
            subtract_(weight[start:stop], change, self.decay)

    def changes(
        self, rows: Range | None = None, columns: Range | None = None, block_rows: int | None = None
    ) -> Iterator[tuple[Range, Tensor]]:
        """dW, or a slice of it, one block of rows at a time.

        Args:
            rows: half-open range of output features; None for all.
            columns: half-open range of input features; None for all.
            block_rows: rows of a block; None for blocks of at most 4 MiB.

        Yields:
            The half-open range of rows, counted from the first of `rows`, and fp32 [rows, columns] of them, bit for bit
            what `dense` gives, in a buffer that the next block overwrites.
        """
        scaled_out, scaled_in = self._scaled_out(rows), self._scaled_in(columns)
        buffer: Tensor | None = None
        for start, stop in row_blocks((scaled_out.shape[0], scaled_in.shape[1]), block_rows):
            if buffer is None:
                buffer = scaled_in.new_empty(stop - start, scaled_in.shape[1])
            yield (start, stop), _exact_product(scaled_out[start:stop], scaled_in, out=buffer[: stop - start])

    def _scaled_out(self, rows: Range | None) -> Tensor:
        """diag(2^exponent_out) L[rows], fp32 [rows, r], exact."""
        start, stop = check_range("rows", rows, self.shape[0])
        exponent = self.exponent_out[start:stop]
        if self.factor_out is not None:
            integers = self.factor_out[start:stop].float()
        else:
            assert self.signs is not None
            integers = self.signs.matrix(self.rank, self.shape[0], rows=(start, stop), device=exponent.device)
        return integers * powers_of_two(exponent)[:, None]

    def _scaled_in(self, columns: Range | None) -> Tensor:
        """R[:, columns] diag(2^exponent_in), fp32 [r, columns], exact."""
        start, stop = check_range("columns", columns, self.shape[1])
        exponent = self.exponent_in[start:stop]
        if self.factor_in is not None:
            integers = self.factor_in[:, start:stop].float()
        else:
            assert self.signs is not None
            integers = self.signs.matrix(self.rank, self.shape[1], columns=(start, stop), device=exponent.device)
        return integers * powers_of_two(exponent)


@torch.no_grad()
def round_factors(
    out_factor: Tensor | None,
    in_factor: Tensor | None,
    *,
    signs: SignFactor | None = None,
    exponent_out: Tensor | None = None,
    exponent_in: Tensor | None = None,
    shape: tuple[int, int] | None = None,
    factor_bits: int,
    key: int,
    decay: float = 1.0,
) -> LowRankUpdate:
    """Round fp32 factors to integers with power-of-two scales, stochastically and without bias.

    Rows of out_factor and columns of in_factor are rounded as `logra.rounding` says, with independent noise, so the
    expectation of the product is the product of the factors.

    Args:
        out_factor: fp32 [out, r]; None where `signs` stands for it.
        in_factor: fp32 [r, in]; None where `signs` stands for it.
        signs: the sign factor of the missing side.
        exponent_out: integers [out], only where `signs` stands for out_factor: its scaling. None for no scaling.
        exponent_in: integers [in], only where `signs` stands for in_factor: its scaling. None for no scaling.
        shape: (out, in); needed only where the sign side has no exponents that tell its width.
        factor_bits: 4 or 8.
        key: stream of the rounding noise, from `hashing.derive_key`. Equal inputs give equal bits everywhere.
        decay: factor of decoupled weight decay, in (0, 1]; rounded to fp32.

    Returns:
        The rounded update, on the device of the factors.

    Raises:
        LograError: factors of a wrong dtype or shape, not finite, or of magnitude above qmax * 2**50; a factor missing
            without signs; exponents for a side that has a factor.
    """
    given = out_factor if out_factor is not None else in_factor
    if given is None:
        raise LograError("round_factors: out_factor and in_factor are both None; at most one can be a sign factor")
    if (out_factor is not None and exponent_out is not None) or (in_factor is not None and exponent_in is not None):
        raise LograError("round_factors: exponents are allowed only for the side that `signs` stands for")
    integers_out = integers_in = None
    if out_factor is not None:
        key_out = derive_key("rounding", key, "out")
        integers_out, exponent_out = round_slices("out_factor", out_factor, dim=1, factor_bits=factor_bits, key=key_out)
    if in_factor is not None:
        key_in = derive_key("rounding", key, "in")
        integers_in, exponent_in = round_slices("in_factor", in_factor, dim=0, factor_bits=factor_bits, key=key_in)
    exponent_out = _sign_exponent("out", exponent_out, shape, given.device)
    exponent_in = _sign_exponent("in", exponent_in, shape, given.device)
    sizes = (len(exponent_out), len(exponent_in))
    if shape is not None and tuple(shape) != sizes:
        raise LograError(f"round_factors: shape is {tuple(shape)}; the factors and exponents have shape {sizes}")
    rank = given.shape[1] if given is out_factor else given.shape[0]
    decay = torch.tensor(decay, dtype=torch.float32).item()
    return LowRankUpdate(sizes, rank, factor_bits, integers_out, integers_in, exponent_out, exponent_in, signs, decay)


@dataclass(frozen=True, eq=False)
class PolicyUpdate:
    """Everything that one training step changes: takes weights of version `base_version` to `version`.

    Attributes:
        base_version: version that the update applies to, >= 0.
        version: version that it produces; always base_version + 1.
        seed: projection seed of the run, in [0, 2**63).
        update_index: index of the update, in [0, 2**63).
        weights: {fully qualified name: LowRankUpdate}.
        tensors: {fully qualified name: new value} of the other tensors that changed, any dtype.
        run_id: names the run that the update belongs to; "" where it belongs to none. At most 128 characters.
        weights_digest: digest of all weights at `version` (see docs/sync.md), 64 hexadecimal digits; None where it was
            not computed.
        weight_storage: "fp32", "split32" or "split24": the merge rule (`logra.merge_rule`), whatever storage a replica has.
        deltas: {fully qualified name: TensorDelta} of other tensors that changed and whose old value is known to whoever
            has version `base_version`. A `Publisher` makes them from `tensors`.

    Raises:
        LograError: a field with a value that is not allowed.
    """

    base_version: int
    version: int
    seed: int
    update_index: int
    weights: Mapping[str, LowRankUpdate]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    run_id: str = ""
    weights_digest: str | None = None
    weight_storage: str = "fp32"
    deltas: Mapping[str, TensorDelta] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("base_version", "version", "seed", "update_index"):
            value = getattr(self, name)
            if not 0 <= value < 2**63:
                raise LograError(f"PolicyUpdate.{name} is {value}; allowed is 0 to 2**63 - 1")
        if self.version != self.base_version + 1:
            raise LograError(
                f"PolicyUpdate.version is {self.version}; allowed is base_version + 1 = {self.base_version + 1}"
            )
        if len(self.names) < len(self.weights) + len(self.tensors) + len(self.deltas):
            counts = Counter([*self.weights, *self.tensors, *self.deltas])
            double = ", ".join(repr(name) for name, count in counts.items() if count > 1)
            raise LograError(f"PolicyUpdate: {double} in two of weights, tensors and deltas; allowed is one of them")
        for name, pattern in _TEXT_FIELDS.items():
            value = getattr(self, name)
            if value is None and name == "weights_digest":
                continue
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise LograError(f"PolicyUpdate.{name} is {value!r:.140}; allowed is {pattern}")

    @property
    def names(self) -> set[str]:
        """The fully qualified names of everything that changes."""
        return {*self.weights, *self.tensors, *self.deltas}

    # The codec builds these classes, so it is imported inside the methods: at import time `packet` depends on `update`.
    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, 64 hexadecimal digits; independent of the order of names and of compression."""
        from logra import packet

        return packet.digest(self)

    @cached_property
    def num_bytes(self) -> int:
        """Length of `to_bytes()`: what is sent and stored."""
        return len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The packet, see `logra.packet`."""
        from logra import packet

        return packet.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> "PolicyUpdate":
        """The update of a packet, with its tensors on the CPU.

        Raises:
            PacketError: the packet is damaged, truncated, too large or of another format version.
        """
        from logra import packet

        return packet.decode(data)


def row_blocks(shape: tuple[int, int], block_rows: int | None = None) -> Iterator[Range]:
    """Half-open ranges that cover the rows of a matrix.

    Args:
        shape: (rows, columns).
        block_rows: rows in a block; None for at least four blocks of at most 4 MiB of fp32 each
            (at least one row).

    Raises:
        LograError: block_rows < 1.
    """
    num_rows, width = shape
    if block_rows is None:
        block_rows = max(1, min(_BLOCK_ELEMENTS // max(1, width), -(-num_rows // _MIN_BLOCKS)))
    if block_rows < 1:
        raise LograError(f"block_rows is {block_rows}; allowed is at least 1")
    for start in range(0, num_rows, block_rows):
        yield start, min(start + block_rows, num_rows)


def subtract_(value: Tensor, change: Tensor, decay: float) -> None:
    """The merge, in place: value <- fl(fl(value * decay) - change).

    Args:
        value: fp32, any shape and strides.
        change: fp32 of the same shape.
        decay: an fp32 number.
    """
    if decay != 1.0:
        value.mul_(decay)
    value.sub_(change)


def _exact_product(scaled_out: Tensor, scaled_in: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of factors with their powers of two, fp32 [rows, columns], without any rounding.

    Every term of an element's sum is an integer times the same power of two, so scaling the factors, which have few
    elements, is as exact as scaling the product. It is never accumulated into the weight itself: whether a kernel adds
    the finished sum or each term is its own affair, and the latter rounds more than once.
    """
    # Lower matmul precisions stay exact: factors have 7 significant bits where TF32 keeps 11 and bf16 8, and both
    # accumulate in fp32. An autocast context would round the *result* to 16 bits, but not what goes to `out`.
    if out is None:
        out = scaled_in.new_empty(scaled_out.shape[0], scaled_in.shape[1])
    return torch.mm(scaled_out, scaled_in, out=out)


def _sign_exponent(side: str, exponent: Tensor | None, shape: tuple[int, int] | None, device: torch.device) -> Tensor:
    """The exponents of a side as int16 on `device`; where there are none, zeros of the size that `shape` tells."""
    if exponent is None:
        if shape is None:
            raise LograError(f"round_factors: side {side!r} has neither a factor nor exponents; pass shape=(out, in)")
        return torch.zeros(shape[0 if side == "out" else 1], dtype=torch.int16, device=device)
    _check_integers(f"exponent_{side}", exponent, exponent.dtype, (len(exponent),), MIN_EXPONENT, MAX_EXPONENT)
    return exponent.to(device=device, dtype=torch.int16)


def _check_integers(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], low: int, high: int) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.is_floating_point():
        raise LograError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; allowed is {dtype} {shape}, integers")
    lowest, highest = torch.stack(torch.aminmax(tensor)).tolist()
    if lowest < low or highest > high:
        raise LograError(f"{name} has values from {lowest} to {highest}; allowed are {low} to {high}")
