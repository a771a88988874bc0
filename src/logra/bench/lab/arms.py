"""The directions that are compared, dense and sketched, behind one interface."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from logra.contracts import Delta, TrustPolicy
from logra.optim import Config, SketchOptimizer
from logra.rl.priced_step import PricedStep
from logra.sketch.targets import find_targets


class SketchedArm:
    """A `SketchOptimizer` and the change that its last step made."""

    def __init__(self, model: nn.Module, settings: dict[str, Any], trust: TrustPolicy | None, seed: int) -> None:
        self.optimizer = SketchOptimizer(model, Config(trust=trust, seed=seed, **settings))

    def step(self, probe: dict[str, Any]) -> dict[str, float]:
        """Price, scale and take the step; its diagnostics."""
        if self.optimizer.config.trust is not None:
            self.optimizer.set_probe(**probe)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.diagnostics()

    def undo(self) -> tuple[dict[nn.Module, Delta], dict[nn.Parameter, Tensor]]:
        """The change that takes the last step back, as an injection takes it."""
        update = self.optimizer.last_update
        if update is None:
            return {}, {}
        modules = {target.fqn: target.module for target in self.optimizer.targets}
        deltas = {modules[fqn]: weight.delta() for fqn, weight in update.weights.items()}
        return {module: Delta(-delta.out_factor, delta.in_factor) for module, delta in deltas.items()}, {}


class DenseArm:
    """A torch optimizer on the same target weights, all others frozen, under the same trust policy."""

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        trust: TrustPolicy | None,
    ) -> None:
        targets = [target.parameter for target in find_targets(model, Config().target_modules)]
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is target for target in targets))
        self.optimizer = build(targets)
        self.priced = None if trust is None else PricedStep(self.optimizer, model, trust)

    def step(self, probe: dict[str, Any]) -> dict[str, float]:
        """Price, scale and take the step; its diagnostics."""
        if self.priced is not None:
            self.priced.set_probe(**probe)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {} if self.priced is None else self.priced.diagnostics

    def undo(self) -> tuple[dict[nn.Module, Delta], dict[nn.Parameter, Tensor]]:
        """The change that takes the last step back, as an injection takes it."""
        displacements = {} if self.priced is None else self.priced.displacements
        return {}, {parameter: -moved for parameter, moved in displacements.items()}


class DenseSpectral(torch.optim.Optimizer):
    """U Vᵀ of the momentum M <- β M + (1 - β) G of each matrix, by an exact SVD."""

    def __init__(self, parameters: Sequence[nn.Parameter], momentum: float) -> None:
        super().__init__(parameters, {"momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Subtract 1e-3 U Vᵀ; the length is the trust policy's to choose."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                u, s, vh = torch.linalg.svd(average, full_matrices=False)
                kept = (s > s[0] * 1e-4).to(u.dtype)  # the numerical rank: the rest is rounding
                parameter.sub_((u * kept) @ vh, alpha=1e-3)


@dataclass(frozen=True)
class Arm:
    """One way from a gradient to a step.

    Attributes:
        settings: of `logra.Config`; empty for a dense arm.
        dense: builds the optimizer of a dense arm.
        constants: dotted name -> what stands there while the arm runs. For what the library fixes, and only a comparison
            varies.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Until the end of the block the constants are those of the arm."""
        with ExitStack() as stack:
            for name, value in self.constants.items():
                stack.enter_context(mock.patch(name, value))
            yield

    def build(self, model: nn.Module, trust: TrustPolicy | None, seed: int) -> SketchedArm | DenseArm:
        """The arm on a model, which is left in its training mode."""
        if self.dense is not None:
            return DenseArm(model, self.dense, trust)
        return SketchedArm(model, self.settings, trust, seed)
