"""Which way does a step go, compared with the true gradient of the same batch?

For a few layers `DirectionProbe` lets the dense gradient G form beside its sketch (only there, only in the steps that are
measured) and compares it with the gradient recovered from the sketch and with the final, rounded update:

    weight space      per layer, see `logra.diagnostics.weight_space`
    function space    all probed layers together: how the logits of the batch respond, under the policy's Fisher metric,
                      and the expected reward gain per root of KL, see `logra.trust.tangents`

The function space is measured where `set_batch` gave responses; the gain where it gave advantages too. These are the
responses that the gradient came from, so gains are in-sample: directions that can memorise look better than they are.
"""

import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from logra import distributed
from logra.contracts import Delta, StepView
from logra.diagnostics.dense_gradient import DenseGradients
from logra.diagnostics.observer import Diagnostic, TaskBatch, over_processes
from logra.diagnostics.weight_space import LayerReport, report
from logra.errors import ConfigError, NonFiniteProbeError
from logra.sketch.experts import stored_name
from logra.trust.tangents import DenseDelta, TangentMoments, tangent_moments

DEFAULT_NUM_LAYERS = 4
DEFAULT_NUM_RESPONSES = 8


@dataclass(frozen=True)
class DirectionReport:
    """What one measurement found.

    Attributes:
        step: number of calls of `step()` before the measured one.
        layers: weight space, by the name of the layer.
        functions: function space and gains by metric name, without the prefix "direction/"; empty without a batch.
    """

    step: int
    layers: Mapping[str, LayerReport]
    functions: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """All numbers as `direction/NAME`: means over the layers, then `direction/NAME/LAYER`, then the function space."""
        rows = {layer: asdict(numbers) for layer, numbers in self.layers.items()}
        metrics: dict[str, float] = {}
        for name in LayerReport.__dataclass_fields__ if rows else ():
            values = [numbers[name] for numbers in rows.values()]
            metrics[f"direction/{name}"] = math.fsum(values) / len(values)
        metrics |= {
            f"direction/{name}/{layer}": float(value)
            for layer, numbers in rows.items()
            for name, value in numbers.items()
        }
        return metrics | {f"direction/{name}": value for name, value in self.functions.items()}


class DirectionProbe(Diagnostic):
    """Compares the estimated gradient and the final update with the dense gradient, in weight and in function space.

    Costs, in the steps that are measured: the dense gradients of these layers (fp32), their singular values, and with
    `set_batch` four forward tangents over `num_responses` responses.

    Args:
        layers: names of target modules, or how many to take, spread evenly over depth and kinds.
        every: calls of `step()` from one measurement to the next.
        num_responses: responses of the batch that the function space is measured on.
        seed: draws them.

    Raises:
        ConfigError: a value that is not allowed; on `attach`, a layer that is not a target.

    Example:
        >>> probe = logra.diagnostics.DirectionProbe(layers=4, every=10)
        >>> probe.attach(opt)
        >>> loss.backward()
        >>> probe.set_batch(input_ids=ids, attention_mask=mask, loss_mask=generated, advantages=advantages)
        >>> opt.step()
        >>> opt.diagnostics()["direction/gradient_cosine"], probe.last.layers
    """

    def __init__(
        self,
        layers: int | Sequence[str] = DEFAULT_NUM_LAYERS,
        every: int = 10,
        *,
        num_responses: int = DEFAULT_NUM_RESPONSES,
        seed: int = 0,
    ) -> None:
        super().__init__(every=every, num_responses=num_responses, seed=seed)
        self._wanted = check_layers("DirectionProbe: layers", layers)
        self._modules: dict[str, nn.Module] = {}
        self._dense: DenseGradients | None = None
        self.last: DirectionReport | None = None
        """The last measurement; None before the first."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the probed modules, once attached."""
        return tuple(self._modules)

    def attached(self, targets: Mapping[str, nn.Module]) -> None:
        """Choose the layers and watch them, see `logra.contracts.StepObserver`."""
        if self._dense is not None:
            raise ConfigError("this DirectionProbe observes an optimizer already: build another one")
        modules = {fqn.removesuffix(".weight"): module for fqn, module in targets.items()}
        self._modules = {name: modules[name] for name in choose_layers(self._wanted, list(modules))}
        self._dense = DenseGradients(self._modules)

    def detached(self) -> None:
        """Take the hooks off the model, see `logra.contracts.StepObserver`."""
        if self._dense is not None:
            self._dense.remove()

    def begin_window(self, step: int) -> None:
        """See `logra.contracts.StepObserver`."""
        super().begin_window(step)
        if self._dense is not None:
            self._dense.clear()
            self._dense.active = self.is_due

    def measure(self, view: StepView) -> dict[str, float]:
        """The numbers of one step, see `DirectionReport.metrics`."""
        assert self._dense is not None
        estimates = {name: view.gradients[_fqn(name)]() for name in self._modules if _fqn(name) in view.gradients}
        shapes = {name: _shape(estimate) for name, estimate in estimates.items()}
        gradients = self._dense.take(shapes)
        for name, gradient in gradients.items():
            if tuple(gradient.shape) != shapes[name]:
                raise ConfigError(
                    f"DirectionProbe: {name!r} computes with a shard {list(gradient.shape)} of its weight {shapes[name]}; "
                    f"layers that are sharded over processes cannot be probed"
                )
        # A layer whose gradient is zero has no direction.
        gradients = {name: gradient for name, gradient in gradients.items() if gradient.any()}
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            raise NonFiniteProbeError("a dense gradient is not finite")
        updates = view.update()
        layers = {
            name: report(gradient, estimates[name], updates[self._modules[name]])
            for name, gradient in gradients.items()
        }
        functions = self._function_space(view.model, gradients, estimates, updates)
        self.last = DirectionReport(view.step, layers, functions)
        return self.last.metrics()

    def _function_space(
        self,
        model: nn.Module,
        gradients: Mapping[str, Tensor],
        estimates: Mapping[str, Delta],
        updates: Mapping[nn.Module, Delta],
    ) -> dict[str, float]:
        batch = self._batch
        has_batch, has_advantages = distributed.any_process(
            [batch is not None, batch is not None and batch.advantages is not None]
        )
        own_updates: dict[nn.Module, Delta] = {}
        for module in (self._modules[name] for name in gradients):
            own_updates[module] = Delta(updates[module].out_factor, updates[module].in_factor)  # weight decay left out
        length = _norm(own_updates)
        if not (has_batch and length > 0):
            return {}
        dense: dict[nn.Module, Delta] = {self._modules[name]: DenseDelta(gradients[name]) for name in gradients}
        estimated = {self._modules[name]: estimates[name] for name in gradients}
        # Gradients have units of their own; changes of one length keep all tangents in the range of fp32.
        changes = [
            _scaled(dense, length / _norm(dense)),
            _scaled(estimated, length / _norm(estimated)),
            own_updates,
            updates,
        ]
        k = len(changes)

        def measure(batch: TaskBatch) -> list[float]:
            moments = tangent_moments(model, batch.probe, changes, batch.advantages)
            gains = torch.zeros(k) if moments.gains is None else moments.gains
            return torch.cat([moments.covariance.flatten(), gains]).tolist()

        values = over_processes(None if batch is None else functools.partial(measure, batch), k * (k + 1))
        means = torch.tensor(values, dtype=torch.float64)
        moments = TangentMoments(means[: k * k].view(k, k), means[k * k :] if has_advantages else None)
        numbers = {
            "gradient_fisher_cosine": moments.cosine(0, 1),
            "update_fisher_cosine": moments.cosine(0, 2),
        }
        if moments.gains is not None:
            numbers |= {
                "dense_gain": moments.gain_per_root_kl(0),
                "gradient_gain": moments.gain_per_root_kl(1),
                "update_gain": moments.gain_per_root_kl(2),
                "step_gain": moments.gain_per_root_kl(3),
            }
        return {name: value for name, value in numbers.items() if math.isfinite(value)}


def check_layers(field: str, layers: int | Sequence[str]) -> int | tuple[str, ...]:
    """`layers` if it is a number of at least 1, or one or more names.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(layers, int) and not isinstance(layers, bool):
        if layers >= 1:
            return layers
    elif isinstance(layers, Sequence) and not isinstance(layers, str):
        names = tuple(layers)
        if names and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names):
            return names
    raise ConfigError(f"{field}={layers!r}: a number of layers of at least 1, or a list of different module names")


def choose_layers(wanted: int | Sequence[str], modules: Sequence[str]) -> list[str]:
    """The modules to probe.

    Args:
        wanted: names, with or without ".weight"; or how many: kinds (q_proj, up_proj, ...) in turn, each at another depth.
        modules: names of all targets, in the order of depth.

    Raises:
        ConfigError: a name that is no target, or more layers than there are targets.
    """
    if not isinstance(wanted, int):
        names = [name.removesuffix(".weight") for name in wanted]
        for name in names:
            if name not in modules:
                close = difflib.get_close_matches(name, modules, n=3, cutoff=0.0)
                raise ConfigError(
                    f"DirectionProbe: layers names {name!r}, which is not a target. Targets are "
                    f"{', '.join(map(repr, close))}, ... ({len(modules)} in all)"
                )
        return names
    if wanted > len(modules):
        raise ConfigError(f"DirectionProbe: layers={wanted}, but there are {len(modules)} targets: give at most these")
    kinds: dict[str, list[str]] = {}
    for name in modules:
        kinds.setdefault(stored_name(name).rpartition(".")[2], []).append(name)
    chosen: list[str] = []
    for i in range(wanted):
        # With fewer layers than kinds, the kinds are spread evenly too.
        index = i * len(kinds) // wanted if wanted < len(kinds) else i % len(kinds)
        members = [name for name in list(kinds.values())[index] if name not in chosen]
        members = members or [name for name in modules if name not in chosen]
        chosen.append(members[int((i + 0.5) / wanted * len(members))])
    return sorted(chosen, key=list(modules).index)


def _fqn(name: str) -> str:
    if stored_name(name) != name:
        return name  # an expert
    return f"{name}.weight" if name else "weight"


def _shape(delta: Delta) -> tuple[int, int]:
    return delta.out_factor.shape[0], delta.in_factor.shape[1]


def _norm(changes: Mapping[nn.Module, Delta]) -> float:
    return math.sqrt(math.fsum(change.norm_squared().item() for change in changes.values()))


def _scaled(changes: Mapping[nn.Module, Delta], factor: float) -> dict[nn.Module, Delta]:
    return {module: change.scaled(factor) for module, change in changes.items()}
