"""The directions that are compared, dense and sketched, behind one interface."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        title: for tables.
        settings: of `logra.Config`; empty for a dense arm.
        dense: builds the optimizer of a dense arm.
    """

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None

    def build(self, model: nn.Module, trust: TrustPolicy | None, seed: int) -> SketchedArm | DenseArm:
        """The arm on a model, which is left in its training mode."""
        if self.dense is not None:
            return DenseArm(model, self.dense, trust)
        return SketchedArm(model, self.settings, trust, seed)


def _row_adam(rank: int, *, scaled: bool) -> Arm:
    title = f"one-sided row_adam, r = {rank}" + (", input scaling" if scaled else "")
    return Arm(title, {"sketch": "one_sided", "direction": "row_adam", "momentum": 0.0, "rank": rank,
                       "input_scaling": scaled, "restore_norm": not scaled})  # fmt: skip


def _two_sided(direction: str, rank: int, momentum: float) -> Arm:
    title = f"two-sided {direction}, r = {rank}" + (f", momentum {momentum}" if momentum else "")
    return Arm(title, {"direction": direction, "rank": rank, "momentum": momentum})


ARMS: dict[str, Arm] = {
    "dense-sgd": Arm("dense gradient", dense=lambda p: torch.optim.SGD(p, lr=1e-2)),
    "dense-sgd-m": Arm("dense gradient, momentum 0.9", dense=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "dense-adamw": Arm("dense AdamW", dense=lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0)),
    "dense-spectral": Arm("dense spectral", dense=lambda p: DenseSpectral(p, 0.0)),
    "dense-spectral-m": Arm("dense spectral, momentum 0.9", dense=lambda p: DenseSpectral(p, 0.9)),
    **{f"row-adam-{rank}": _row_adam(rank, scaled=False) for rank in (4, 32, 64, 256)},
    **{f"row-adam-scaled-{rank}": _row_adam(rank, scaled=True) for rank in (4, 32, 64, 256)},
    **{
        f"{direction}-{rank}{'-m' if momentum else ''}": _two_sided(direction, rank, momentum)
        for direction, rank in (("spectral", 16), ("spectral", 32), ("factored", 16))
        for momentum in (0.0, 0.9)
    },
}
"""By the names that cells carry. The paper's norm restoration goes with row_adam where inputs are not scaled."""
