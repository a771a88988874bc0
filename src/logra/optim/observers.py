"""Shows a step to those who measure it, right before it is merged."""

import functools
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from logra.contracts import Delta, StepObserver, StepView
from logra.optim.layer import LayerGradient
from logra.sketch.targets import Target
from logra.update import LowRankUpdate


def is_due(observers: Sequence[StepObserver]) -> bool:
    """Whether one of them will look at the coming step; those that do not tell look at every one."""
    return any(getattr(observer, "is_due", True) for observer in observers)


def observe(
    observers: Sequence[StepObserver],
    model: nn.Module,
    *,
    step: int,
    moving: Sequence[Target],
    gradients: Mapping[str, LayerGradient],
    updates: Mapping[str, LowRankUpdate],
    dense: Mapping[nn.Parameter, Tensor],
) -> dict[str, float]:
    """What the observers measure of one step.

    Args:
        observers: any number.
        model: weights as they are before the step.
        step: number of calls of `step()` before this one.
        moving: the targets that ran backward.
        gradients: recovered gradients by fully qualified name, not clipped.
        updates: the rounded updates by fully qualified name.
        dense: parameters that are no targets -> what the step subtracts from them, as far as it is known.
    """

    def gradient(target: Target) -> Delta:
        return gradients[target.fqn].delta((target.out_features, target.in_features))

    def update() -> Mapping[nn.Module, Delta]:
        return {target.module: updates[target.fqn].delta() for target in moving}

    thunks = {target.fqn: functools.partial(gradient, target) for target in moving}
    view = StepView(model=model, step=step, gradients=thunks, update=update, dense=dense)
    measured: dict[str, float] = {}
    for observer in observers:
        measured |= observer.observe(view)
    return measured
