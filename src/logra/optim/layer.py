"""One layer's step, from its sketches to a proposed direction and the next state. Pure functions of tensors.

The order is that of the method: recover the gradient, clip it, update the moments, take the direction. Nothing here
changes a weight or a stored state: `Proposal.state` is what the optimizer commits if the step is accepted.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logra.contracts import Delta
from logra.optim import direction as directions
from logra.optim import momentum as momenta
from logra.optim.config import Config
from logra.optim.norms import norm64
from logra.powers import scale_by_powers
from logra.sketch.recovery import recover
from logra.update import LowRankUpdate, SignFactor, round_factors


@dataclass(frozen=True)
class LayerGradient:
    """The recovered gradient of one target, in factors.

    One-sided: `sketch` S [rows, r] with rows the out features (side "in") or the in features (side "out", S = Tᵀ).
    Two-sided: q [out, k] with orthonormal columns and r [k, in], of G diag(s).

    Attributes:
        norm: Frobenius norm of the recovered gradient without input scales, fp32 scalar.
        signs: the projection of a one-sided sketch.
        exponents: log2 of the input scales s, integers [in]; None means s = 1.
    """

    norm: Tensor
    sketch: Tensor | None = None
    q: Tensor | None = None
    r: Tensor | None = None
    signs: SignFactor | None = None
    exponents: Tensor | None = None

    def scaled(self, factor: float | Tensor) -> "LayerGradient":
        """The gradient times `factor`."""
        return LayerGradient(
            norm=self.norm * factor,
            sketch=None if self.sketch is None else self.sketch * factor,
            q=self.q,
            r=None if self.r is None else self.r * factor,
            signs=self.signs,
            exponents=self.exponents,
        )

    def delta(self, shape: tuple[int, int]) -> Delta:
        """The recovered gradient itself, without input scales: Ĝ = Q R diag(1/s), or S A diag(1/s) / r.

        Args:
            shape: (out, in).
        """
        inverse = None if self.exponents is None else -self.exponents
        if self.sketch is None:
            assert self.q is not None and self.r is not None
            return Delta(self.q, self.r if inverse is None else scale_by_powers(self.r, inverse))
        assert self.signs is not None
        rank = self.sketch.shape[1]
        if self.signs.side == "in":
            return Delta(self.sketch / rank, scaled_signs(self.signs, rank, shape[1], inverse, self.sketch.device))
        signs = self.signs.matrix(rank, shape[0], device=self.sketch.device)
        rows = self.sketch.T if inverse is None else scale_by_powers(self.sketch.T, inverse)
        return Delta(signs / rank, rows)


@dataclass(frozen=True)
class Proposal:
    """A direction for one target in factors, ΔW = out_factor in_factor up to a common scale, and the state behind it.

    Attributes:
        out_factor: fp32 [out, r]; None where `signs` stands for it.
        in_factor: fp32 [r, in], input scales included; None where `signs` stands for it.
        signs: the factor of ±1.
        exponents: log2 of the input scales of a sign factor on the in side.
        shape: (out, in).
        state: the target's next optimizer state, tensors and plain scalars.
    """

    out_factor: Tensor | None
    in_factor: Tensor | None
    signs: SignFactor | None
    exponents: Tensor | None
    shape: tuple[int, int]
    state: dict[str, Any] = field(default_factory=dict)

    def delta(self, scale: float | Tensor = 1.0, decay: float = 1.0) -> Delta:
        """The change of the weight with the sign factor written out."""
        out_factor, in_factor = self.out_factor, self.in_factor
        if out_factor is None:
            assert self.signs is not None and in_factor is not None
            out_factor = self.signs.matrix(in_factor.shape[0], self.shape[0], device=in_factor.device)
        if in_factor is None:
            assert self.signs is not None
            in_factor = scaled_signs(self.signs, out_factor.shape[1], self.shape[1], self.exponents, out_factor.device)
        return Delta(out_factor * scale, in_factor, decay)

    def rounded(self, scale: float, decay: float, *, factor_bits: int, key: int) -> LowRankUpdate:
        """`scale` times the direction in integers, stochastically rounded with the noise stream `key`."""
        out_factor, in_factor = self.out_factor, self.in_factor
        # The scale goes to the factor that is not made of signs.
        if out_factor is not None:
            out_factor = out_factor * scale
        elif in_factor is not None:
            in_factor = in_factor * scale
        return round_factors(
            out_factor,
            in_factor,
            signs=self.signs,
            exponent_in=self.exponents,
            shape=self.shape,
            factor_bits=factor_bits,
            key=key,
            decay=decay,
        )


def scaled_signs(signs: SignFactor, rank: int, width: int, exponents: Tensor | None, device: torch.device) -> Tensor:
    """A diag(s), fp32 [r, in]."""
    matrix = signs.matrix(rank, width, device=device)
    return matrix if exponents is None else scale_by_powers(matrix, exponents)


def mean_gradient_norm(state: dict[str, Any], beta: float) -> Tensor:
    """‖M̂‖_F = ‖M‖_F / (1 - βⁿ) of the two-sided momentum in a next state, without input scales, fp32 scalar.

    Args:
        state: with the momentum M of n updates.
        beta: β, decay of the momentum.
    """
    in_factor, exponents = state["momentum_in"], state.get("moment_exponents")  # the out factor is orthonormal
    unscaled = in_factor if exponents is None else scale_by_powers(in_factor, -exponents)
    return (norm64(unscaled) / (1 - beta ** state["step"])).float()


def gradient_two_sided(on_in: Tensor, on_out: Tensor, out_signs: SignFactor, exponents: Tensor | None) -> LayerGradient:
    """Ĝ diag(s) = Q R from S = G diag(s) Aᵀ and T = B G."""
    if exponents is not None:
        on_out = scale_by_powers(on_out, exponents)
    signs_out = out_signs.matrix(on_out.shape[0], on_in.shape[0], device=on_in.device)
    q, r = recover(on_in, on_out, signs_out)
    unscaled = r if exponents is None else scale_by_powers(r, -exponents)
    return LayerGradient(norm=norm64(unscaled).float(), q=q, r=r, exponents=exponents)


def gradient_one_sided(sketch: Tensor, signs: SignFactor, width: int, exponents: Tensor | None) -> LayerGradient:
    """The gradient that one sketch stands for: S A diag(1/s) / r (or its mirror image), whose expectation is G.

    Its norm comes from Gram matrices: ‖S A‖² = tr(SᵀS A Aᵀ), r x r.

    Args:
        sketch: S [out, r] for signs on the in side, T [r, in] for signs on the out side.
        signs: the projection.
        width: number of features that the projection spans.
        exponents: log2 of the input scales.
    """
    rank = sketch.shape[1] if signs.side == "in" else sketch.shape[0]
    if signs.side == "in":
        rows = sketch
        inverse = None if exponents is None else -exponents
        projection = scaled_signs(signs, rank, width, inverse, sketch.device)
        norm = _product_norm(rows, projection) / rank
    else:
        projection = signs.matrix(rank, width, device=sketch.device)
        norm = _product_norm(projection, sketch) / rank
        rows = (sketch if exponents is None else scale_by_powers(sketch, exponents)).T
    return LayerGradient(norm=norm, sketch=rows, signs=signs, exponents=exponents)


def _product_norm(out_factor: Tensor, in_factor: Tensor) -> Tensor:
    """‖out_factor in_factor‖_F, fp32 scalar, with Gram matrices in fp64: squares may leave the range of fp32."""
    return Delta(out_factor.double(), in_factor.double()).norm_squared().sqrt().float()


def propose(config: Config, gradient: LayerGradient, state: dict[str, Any], shape: tuple[int, int]) -> Proposal:
    """Momentum, second moments and direction of one layer.

    Args:
        config: settings.
        gradient: the recovered (and clipped) gradient.
        state: the layer's current state; not changed.
        shape: (out, in).
    """
    state = _in_current_scales(state, gradient)
    if gradient.sketch is None:
        return _propose_two_sided(config, gradient, state, shape)
    return _propose_one_sided(config, gradient, state, shape)


def _in_current_scales(state: dict[str, Any], gradient: LayerGradient) -> dict[str, Any]:
    """The state of G diag(s_old) as that of G diag(s_new): its in side times s_new / s_old, second moments squared."""
    new, old = gradient.exponents, state.get("moment_exponents")
    if new is None:
        return state
    shift = new if old is None else new - old
    state = dict(state)
    scalings = {"momentum_in": shift, "exp_avg_sq_column": 2 * shift}
    if gradient.signs is not None and gradient.signs.side == "out":
        # The rows of a sketch of the out side are the in features.
        scalings |= {"momentum": shift[:, None], "exp_avg_sq": 2 * shift}
    for name in scalings.keys() & state.keys():
        state[name] = scale_by_powers(state[name], scalings[name])
    return state


def _begin_state(gradient: LayerGradient, state: dict[str, Any]) -> dict[str, Any]:
    """What every next state begins with: the number of updates, and the input scales that its moments are taken with."""
    scales = {} if gradient.exponents is None else {"moment_exponents": gradient.exponents}
    return {"step": state.get("step", 0) + 1} | scales


def _propose_two_sided(
    config: Config, gradient: LayerGradient, state: dict[str, Any], shape: tuple[int, int]
) -> Proposal:
    q, r = gradient.q, gradient.r
    assert q is not None and r is not None
    new_state = _begin_state(gradient, state)
    step = new_state["step"]
    row, column = directions.row_moment_of_factors(q, r), directions.column_moment_of_factors(q, r)
    if config.momentum > 0:
        if "momentum_out" in state:
            old = state["momentum_out"], state["momentum_in"]
            q, r = momenta.truncated_sum(*old, q, r, config.momentum, config.rank)
        else:
            r = (1 - config.momentum) * r
        new_state["momentum_out"], new_state["momentum_in"] = q, r
    if config.direction == "spectral":
        out_factor, in_factor = directions.spectral_of_factors(q, r)
    else:
        out_factor, in_factor = directions.balanced(q, r)
        new_state["exp_avg_sq_row"] = directions.ema(state.get("exp_avg_sq_row"), row, directions.BETA2)
        if config.direction == "row_adam":
            out_factor = directions.row_adam(out_factor, new_state["exp_avg_sq_row"], step)
        else:
            new_state["exp_avg_sq_column"] = directions.ema(state.get("exp_avg_sq_column"), column, directions.BETA2)
            row_scale, column_scale = directions.factored_scales(
                new_state["exp_avg_sq_row"], new_state["exp_avg_sq_column"], step
            )
            out_factor, in_factor = out_factor * row_scale[:, None], in_factor * column_scale
    if gradient.exponents is not None:
        in_factor = scale_by_powers(in_factor, gradient.exponents)
    return Proposal(out_factor, in_factor, None, None, shape, new_state)


def _propose_one_sided(
    config: Config, gradient: LayerGradient, state: dict[str, Any], shape: tuple[int, int]
) -> Proposal:
    sketch, signs = gradient.sketch, gradient.signs
    assert sketch is not None and signs is not None
    new_state = _begin_state(gradient, state)
    step = new_state["step"]
    numerator = sketch
    if config.momentum > 0:
        numerator = directions.ema(_carried_momentum(gradient, state, shape), sketch, config.momentum)
        new_state["momentum"] = numerator
        new_state["momentum_projection"] = signs.update_index
    if config.direction == "spectral":
        result = directions.spectral(numerator)
    else:
        new_state["exp_avg_sq"] = directions.ema(
            state.get("exp_avg_sq"), directions.row_moment(sketch), directions.BETA2
        )
        result = directions.row_adam(numerator, new_state["exp_avg_sq"], step)
        if config.restore_norm:
            result = directions.restore_norm(result, numerator)
    if signs.side == "in":
        return Proposal(result, None, signs, gradient.exponents, shape, new_state)
    in_factor = result.T if gradient.exponents is None else scale_by_powers(result.T, gradient.exponents)
    return Proposal(None, in_factor.contiguous(), signs, None, shape, new_state)


def _carried_momentum(gradient: LayerGradient, state: dict[str, Any], shape: tuple[int, int]) -> Tensor | None:
    """The momentum of the last update in the projections of this one."""
    momentum, signs = state.get("momentum"), gradient.signs
    if momentum is None or signs is None or state["momentum_projection"] == signs.update_index:
        return momentum
    old = SignFactor(signs.seed, state["momentum_projection"], signs.name, signs.side)
    rank, width = momentum.shape[1], shape[1] if signs.side == "in" else shape[0]
    if signs.side == "out":
        old_signs, new_signs = (sign.matrix(rank, width, device=momentum.device).T for sign in (old, signs))
    else:
        exponents = state.get("moment_exponents")
        inverse = None if exponents is None else -exponents
        old_signs = scaled_signs(old, rank, width, inverse, momentum.device)
        new_signs = scaled_signs(signs, rank, width, gradient.exponents, momentum.device)
    return momenta.carry_over(momentum, old_signs, new_signs)
