"""How the logits respond to several weight changes, compared token by token under the policy's own metric.

For weight changes i = 1 .. k with logit tangents d_i (forward tangents, as in `logra.trust.measure`), temperature tau and
p = softmax(z / tau), at every generated token

    <d_i, d_j>_p = Cov_p(d_i / tau, d_j / tau)           Fisher metric; 1/2 <d_i, d_i>_p is the KL to second order
    slope_i      = d log p(token) along i = (d_i[token] - E_p d_i) / tau

and, with one advantage A per response,

    covariance_ij = mean over generated tokens of <d_i, d_j>_p             nats per generated token
    gain_i        = mean over responses of the sum over their generated tokens of A slope_i
                                                                           advantage units x nats per response

The gain is the first-order rise of E[reward] (in units of the advantage) along the change, by the policy-gradient theorem.
Dividing by sqrt(KL) makes it independent of the length of the change.

One pass of the backbone per change; logits exist for a few tokens at a time, k tangents beside them. Refuses what
`logra.trust.measure` refuses.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from logra.contracts import Delta
from logra.errors import NonFiniteProbeError, ProbeError
from logra.trust.constant_tangent import ConstantTangent
from logra.trust.forward import CHUNK_TOKENS, LogitReader, probe_mode
from logra.trust.injection import Injection
from logra.trust.measure import _device, _forward_ad_errors, _load_forward_derivatives
from logra.trust.probe import Probe, ProbeBatch


class DenseDelta(Delta):
    """A weight change that is given in full, W <- W - change. For diagnostics: a step of the optimizer never forms one.

    Args:
        change: [out, in].
    """

    def __init__(self, change: Tensor) -> None:
        super().__init__(out_factor=change, in_factor=torch.ones((), device=change.device))

    def scaled(self, alpha: float) -> "DenseDelta":
        """The same direction, `alpha` times as long."""
        return DenseDelta(self.out_factor * alpha)

    def norm_squared(self) -> Tensor:
        """‖change‖²_F, fp32 scalar."""
        return torch.linalg.vector_norm(self.out_factor) ** 2

    def subtracted_output(self, x: Tensor) -> Tensor:
        """change x, see `Delta`."""
        return x @ self.out_factor.to(x.dtype).T


@dataclass(frozen=True)
class TangentMoments:
    """What `tangent_moments` measured along k weight changes.

    Attributes:
        covariance: fp64 [k, k], nats per generated token.
        gains: fp64 [k], advantage units x nats per response; None where no advantages were given.
    """

    covariance: Tensor
    gains: Tensor | None

    def kl(self, i: int) -> float:
        """KL to second order of the change `i`, nats per generated token."""
        return 0.5 * self.covariance[i, i].item()

    def cosine(self, i: int, j: int) -> float:
        """Fisher cosine of the changes `i` and `j`, in [-1, 1]; NaN if one of them moves nothing."""
        scale = math.sqrt(self.covariance[i, i].item()) * math.sqrt(self.covariance[j, j].item())
        return self.covariance[i, j].item() / scale if scale > 0 else math.nan

    def gain_per_root_kl(self, i: int) -> float:
        """gain_i / sqrt(KL_i), advantage units per response and sqrt(nats per token); NaN if the change moves nothing."""
        assert self.gains is not None, "no advantages were given"
        kl = self.kl(i)
        return self.gains[i].item() / math.sqrt(kl) if kl > 0 else math.nan


def tangent_moments(
    model: nn.Module,
    probe: Probe,
    changes: Sequence[Mapping[nn.Module, Delta]],
    advantages: Tensor | None = None,
) -> TangentMoments:
    """Fisher products of the logit tangents of several weight changes, and their expected reward gains.

    Args:
        model: causal language model, not changed.
        probe: from `build_probe`.
        changes: k weight changes, each target module -> change of its weight.
        advantages: [num_responses], one per response in the order of `probe.selected`.

    Returns:
        Means over the probe of this process.

    Raises:
        ProbeError: see `logra.trust.measure`; or advantages of another number than the probe has responses.
        NonFiniteProbeError: logits, tangents or advantages not finite.
    """
    if advantages is not None and advantages.shape != (probe.num_responses,):
        raise ProbeError(
            f"advantages has shape {tuple(advantages.shape)}: the probe has {probe.num_responses} responses."
        )
    factors = [
        factor for change in changes for delta in change.values() for factor in (delta.out_factor, delta.in_factor)
    ]
    if not torch.stack([factor.isfinite().all() for factor in factors]).all():
        raise NonFiniteProbeError("a weight change has factors that are not finite.")
    _load_forward_derivatives()
    reader = LogitReader(model)
    injections = [Injection(change, "tangent") for change in changes]
    covariance = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    gains = torch.zeros(len(changes), dtype=torch.float64)
    first_response = 0
    with probe_mode(model, _device(probe)), _forward_ad_errors(model), ConstantTangent():
        for batch in probe.batches:
            with forward_ad.dual_level():
                outputs = []
                for injection in injections:
                    with injection:
                        outputs.append(reader.run(batch))
                for chunk in _chunks(batch, len(changes)):
                    duals = []
                    for injection, output in zip(injections, outputs, strict=True):
                        with injection:
                            duals.append(forward_ad.unpack_dual(reader.read(batch, output, chunk)))
                    tangents = [
                        _require(dual.tangent, model, injection)
                        for dual, injection in zip(duals, injections, strict=True)
                    ]
                    centred, products = _covariances(duals[0].primal, tangents, probe.temperature)
                    covariance += products
                    if advantages is not None:
                        rows, columns = batch.rows[chunk], batch.columns[chunk]
                        tokens = batch.input_ids[rows, columns + 1]
                        weights = advantages.to(rows.device)[rows + first_response].double()
                        slopes = torch.stack([tangent.gather(1, tokens[:, None])[:, 0] for tangent in centred])
                        gains += (slopes.double() @ weights).cpu()
            first_response += len(batch.input_ids)
    for injection in injections:
        injection.check_reached()
    covariance /= probe.num_tokens
    gains /= probe.num_responses
    if not (covariance.isfinite().all() and gains.isfinite().all()):
        raise NonFiniteProbeError("logits, logit tangents or advantages on the probe are not finite.")
    return TangentMoments(covariance, None if advantages is None else gains)


def _covariances(logits: Tensor, tangents: Sequence[Tensor], temperature: float) -> tuple[list[Tensor], Tensor]:
    """Centred tangents (d_i - E_p d_i) / tau, k times [n, V], and the sum over n of their covariances, fp64 [k, k]."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    p = torch.softmax(logits.to(dtype) / temperature, dim=-1)
    centred = []
    for tangent in tangents:
        moved = tangent.to(dtype) / temperature
        # Two passes, as in `divergence.half_variance`: a common drift of all logits must cancel before squaring.
        centred.append(moved - (p * moved).sum(-1, keepdim=True))
    products = torch.zeros(len(tangents), len(tangents), dtype=torch.float64)
    for i, a in enumerate(centred):
        weighted = p * a
        for j in range(i, len(centred)):
            products[i, j] = products[j, i] = (weighted * centred[j]).sum(-1).double().sum().cpu()
    return centred, products


def _chunks(batch: ProbeBatch, num_changes: int) -> Iterator[slice]:
    """Slices of the generated tokens, small enough that k tangents take the memory of one in `predicted_kl`."""
    size = max(1, CHUNK_TOKENS // max(num_changes, 1))
    for start in range(0, batch.columns.numel(), size):
        yield slice(start, start + size)


def _require(tangent: Tensor | None, model: nn.Module, injection: Injection) -> Tensor:
    """The tangent, or the reason why there is none."""
    if tangent is None:
        injection.check_reached()
        raise ProbeError(
            f"a weight change does not reach the logits of {type(model).__name__}: something between the targets and the "
            "logits detaches them, or the tokens of the probe do not pass through the targets."
        )
    return tangent
