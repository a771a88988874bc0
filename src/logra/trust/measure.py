"""The KL of a proposed update on a probe, in nats per generated token, without writing a weight.

    predicted_kl    1/2 Var_p(d / tau), d the forward tangent of the logits: exact to second order in the step
    difference_kl   the same with d = (z(eps delta) - z(0)) / eps: no forward derivative needed
    realised_kl     KL(p || p') of the finite step

Each is the mean over the probe's generated tokens, and the same inputs give the same number.

Refuses (ProbeError): a model without a forward derivative, a tangent that was lost on the way (it never reads as
KL = 0), deltas that are all zero. NonFiniteProbeError: logits or a KL that is NaN or infinite.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from logra.contracts import Delta, Deltas
from logra.errors import NonFiniteProbeError, ProbeError
from logra.shards import uncast_activations
from logra.trust.constant_tangent import ConstantTangent
from logra.trust.dense import DenseInjection
from logra.trust.divergence import exact_kl, half_variance
from logra.trust.forward import LogitReader, probe_mode, token_chunks
from logra.trust.injection import Injection
from logra.trust.precision import Float32Forward
from logra.trust.probe import Probe, ProbeBatch

# Step of the difference quotient: the error of first order is below 1 % for proposals of up to about 1 nat, and the
# moved logits stand 20 times above fp32 noise for proposals down to about 1e-3 nats. A power of two scales exactly.
DIFFERENCE_STEP = 2.0**-7

# Tokens whose divergence is computed at once.
STATISTIC_ROWS = 32


class _Tally:
    """Collects per-token KLs of the tokens that count, and the two facts that decide whether their mean means anything."""

    def __init__(self) -> None:
        self.kls: list[Tensor] = []
        self.finite: list[Tensor] = []
        self.moved: list[Tensor] = []

    def add(self, batch: ProbeBatch, chunk: slice, kl: Tensor, logits: Tensor, moved: Tensor) -> None:
        self.kls.append(kl[: max(0, batch.counted - chunk.start)])
        self.finite.append(torch.isfinite(logits).all())
        self.moved.append(moved)

    def mean(self) -> float:
        """Mean over all tokens that count, summed in fp64; 0 without any. Raises NonFiniteProbeError."""
        if not torch.stack(self.finite).all():
            raise NonFiniteProbeError("the model's logits on the probe are not finite, before any update.")
        kls = torch.cat(self.kls)
        if kls.numel() == 0:
            return 0.0
        mean = kls.cpu().double().mean().item()
        if not math.isfinite(mean):
            raise NonFiniteProbeError(
                f"the KL of the proposed update is {mean}: the update or its effect is not finite."
            )
        return mean

    def any_moved(self) -> bool:
        return bool(torch.stack(self.moved).any())


def predicted_kl(
    model: nn.Module,
    probe: Probe,
    deltas: Mapping[nn.Module, Delta],
    dense: Mapping[nn.Parameter, Tensor] | None = None,
) -> float:
    """Second-order KL of the update from one forward with a tangent, in the precision that the model computes in.

    Args:
        model: causal language model.
        probe: from `build_probe`.
        deltas: target module -> proposed change of its weight.
        dense: other parameters that move in the same step -> what is subtracted from each, of its shape.

    Returns:
        Nats per generated token.

    Raises:
        ProbeError, NonFiniteProbeError: see the module docstring.
    """
    dense = dense or {}
    _check_finite(deltas, dense)
    _load_forward_derivatives()
    tally = _Tally()
    reader = LogitReader(model)
    injection, swap = Injection(deltas, "tangent"), DenseInjection(model, dense, "tangent")
    base: list[Tensor] = []
    lost = False
    with probe_mode(model, _device(probe)), _forward_ad_errors(model), ConstantTangent() as rules:
        for batch in probe.batches:
            with forward_ad.dual_level(), injection, swap:
                output = reader.run(batch)
                base.append(forward_ad.unpack_dual(output).primal)
                for chunk in token_chunks(batch):
                    logits, tangent = forward_ad.unpack_dual(reader.read(batch, output, chunk))
                    if tangent is None:
                        lost = True  # raised below: other processes may be waiting for the forwards that remain
                        continue
                    kl = _by_rows(lambda z, d: half_variance(z, d, probe.temperature), logits, tangent)
                    tally.add(batch, chunk, kl, logits, (tangent != 0).any())
    injection.check_reached()
    if lost:
        raise _lost_or_zero(model, deltas, dense)
    mean = tally.mean()
    if probe.num_tokens and not tally.any_moved():
        raise _lost_or_zero(model, deltas, dense)
    if reader.output_is_small and not rules.saw_low_precision:
        probe.base.keep(model, base, by_itself=True)
    return mean


def difference_kl(
    model: nn.Module,
    probe: Probe,
    deltas: Mapping[nn.Module, Delta],
    dense: Mapping[nn.Parameter, Tensor] | None = None,
) -> float:
    """Second-order KL of the update from two fp32 forwards, at 0 and at `DIFFERENCE_STEP` times the step.

    Args, Returns, Raises: as `predicted_kl`.
    """
    step = DIFFERENCE_STEP
    dense = dense or {}

    def statistic(logits: Tensor, new_logits: Tensor) -> Tensor:
        return half_variance(logits, new_logits - logits, probe.temperature) / step**2

    tally = _compare(
        model,
        probe,
        Deltas({module: partial(_scaled, deltas, module, step) for module in deltas}),
        {parameter: displacement * step for parameter, displacement in dense.items()},
        statistic,
    )
    mean = tally.mean()
    if probe.num_tokens and not tally.any_moved():
        raise _lost_or_zero(model, deltas, dense)
    return mean


def realised_kl(
    model: nn.Module,
    probe: Probe,
    deltas: Mapping[nn.Module, Delta],
    dense: Mapping[nn.Parameter, Tensor] | None = None,
) -> float:
    """Exact KL(p || p') between the model and the model with the update injected, from two fp32 forwards.

    The forward of the unchanged model is taken from an earlier measurement on this probe where there is one.

    Args, Returns: as `predicted_kl`. Deltas that are all zero have KL 0.

    Raises:
        ProbeError: no target module ran.
        NonFiniteProbeError: logits or KL not finite.
    """
    return _compare(
        model, probe, deltas, dense or {}, lambda logits, new_logits: exact_kl(logits, new_logits, probe.temperature)
    ).mean()


def probe_logits(model: nn.Module, probe: Probe) -> list[Tensor]:
    """Logits of the model at the probe's generated tokens, fp32 [n, V] on the CPU, one tensor a chunk."""
    device = _device(probe)
    reader = LogitReader(model)
    logits = []
    with probe_mode(model, device), uncast_activations(model), Float32Forward(device.type):
        for batch in probe.batches:
            output = reader.run(batch)
            logits += [reader.read(batch, output, chunk).cpu() for chunk in token_chunks(batch)]
    return logits


def kl_since(model: nn.Module, probe: Probe, before: Sequence[Tensor]) -> float:
    """Exact KL(p || p') between the policy whose `probe_logits` are `before` and the model as it is now.

    Raises:
        NonFiniteProbeError: logits or KL not finite.
    """
    tally = _Tally()
    chunks = [(batch, chunk) for batch in probe.batches for chunk in token_chunks(batch)]
    for (batch, chunk), logits, new_logits in zip(chunks, before, probe_logits(model, probe), strict=True):
        kl = _by_rows(lambda old, new: exact_kl(old, new, probe.temperature), logits, new_logits)
        tally.add(batch, chunk, kl, logits, (new_logits != logits).any())
    return tally.mean()


def _compare(
    model: nn.Module,
    probe: Probe,
    deltas: Mapping[nn.Module, Delta],
    dense: Mapping[nn.Parameter, Tensor],
    statistic: Callable[[Tensor, Tensor], Tensor],
) -> _Tally:
    """`statistic(logits, logits with the update)` for every chunk of generated tokens."""
    _check_finite(deltas, dense)
    device = _device(probe)
    tally = _Tally()
    reader = LogitReader(model)
    injection, swap = Injection(deltas, "value"), DenseInjection(model, dense, "value")
    kept = probe.base.outputs if probe.base.holds_for(model) else None
    by_itself = kept is not None and probe.base.by_itself
    base: list[Tensor] = []
    precise = nullcontext() if by_itself else Float32Forward(device.type)
    with probe_mode(model, device), uncast_activations(model), precise:
        for index, batch in enumerate(probe.batches):
            with injection, swap:
                new_output = reader.run(batch)
            output = reader.run(batch) if kept is None else kept[index]
            base.append(output)
            for chunk in token_chunks(batch):
                logits = reader.read(batch, output, chunk)
                with injection, swap:
                    new_logits = reader.read(batch, new_output, chunk)
                moved = (new_logits != logits).any()
                tally.add(batch, chunk, _by_rows(statistic, logits, new_logits), logits, moved)
    injection.check_reached()
    if reader.output_is_small:
        probe.base.keep(model, base, by_itself=by_itself)
    return tally


def _scaled(deltas: Mapping[nn.Module, Delta], module: nn.Module, step: float) -> Delta:
    return deltas[module].scaled(step)


def _by_rows(statistic: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    """`statistic` of a chunk, a few rows at a time: its temporaries then fit a CPU's cache."""
    blocks = zip(first.split(STATISTIC_ROWS), second.split(STATISTIC_ROWS), strict=True)
    return torch.cat([statistic(*block) for block in blocks])


def _device(probe: Probe) -> torch.device:
    return probe.batches[0].input_ids.device


def _check_finite(deltas: Mapping[nn.Module, Delta], dense: Mapping[nn.Parameter, Tensor]) -> None:
    """Raise NonFiniteProbeError for NaN or infinite changes: behind a saturating layer their KL could look harmless."""
    finite = [factor.isfinite().all() for delta in deltas.values() for factor in (delta.out_factor, delta.in_factor)]
    finite += [displacement.isfinite().all() for displacement in dense.values()]
    if finite and not torch.stack(finite).all():
        raise NonFiniteProbeError("the proposed update has changes that are not finite.")


def _load_forward_derivatives() -> None:
    """The first dual tensor of a process makes PyTorch load some of its formulas, with a deprecation warning of its own."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


@contextmanager
def _forward_ad_errors(model: nn.Module) -> Iterator[None]:
    """Turns PyTorch's complaints about a missing forward derivative into a ProbeError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "forward AD" not in text and "jvp" not in text and "Jvp" not in text:
            raise
        raise ProbeError(
            f"{type(model).__name__} has an operation without a forward derivative ({text.splitlines()[0][:200]}); "
            "use TrustRegion(method='difference')."
        ) from error


def _lost_or_zero(
    model: nn.Module, deltas: Mapping[nn.Module, Delta], dense: Mapping[nn.Parameter, Tensor]
) -> ProbeError:
    """Why nothing moved: the proposal is zero, or its effect got lost between the targets and the logits."""
    zero = all(
        delta.decay == 1.0 and not (delta.out_factor.any() and delta.in_factor.any()) for delta in deltas.values()
    )
    if zero and not any(displacement.any() for displacement in dense.values()):
        return ProbeError("every proposed weight change is zero: there is no direction to price. Skip this step.")
    return ProbeError(
        f"the proposed update does not reach the logits of {type(model).__name__}: something between the targets and "
        "the logits detaches them (detach(), .data, numpy, a kernel without a forward derivative), or the tokens of the "
        "probe do not pass through the targets."
    )
