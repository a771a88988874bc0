"""The true dense gradient of a few layers, for comparison: G = sum of Hᵀ X over the calls of the module, fp32 [out, in].

A forward hook keeps the module's input X and watches the gradient H of its output arrive, beside the sketch and from the
same numbers. It returns nothing to autograd, so the training is not changed by a bit. It acts only while `active`, and
costs the gradient of these layers, and their inputs until backward has passed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from logra import distributed
from logra.errors import CaptureError


class DenseGradients:
    """Accumulates the dense gradients of some modules.

    Args:
        modules: by name; each takes one tensor [..., in] and returns one tensor [..., out].
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.active = False
        self._names = list(modules)
        self._totals: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in modules.items():
            hook: Any = _Hook(self, name)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.clear()
        self.active = False

    def clear(self) -> None:
        """Forget what has accumulated."""
        self._totals = {}

    def take(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Hand over what has accumulated, averaged over processes, by name; without the modules that ran nowhere.

        Args:
            shapes: name -> (out, in), for the processes on which a module did not run.
        """
        totals, self._totals = self._totals, {}
        ran = distributed.any_process([name in totals for name in self._names])
        names = [name for name, anywhere in zip(self._names, ran, strict=True) if anywhere]
        device = next((total.device for total in totals.values()), None)
        gradients = {name: totals.get(name, torch.zeros(0)) for name in names}
        for name in names:
            if name not in totals:
                gradients[name] = torch.zeros(shapes[name], device=device)
        distributed.average_(list(gradients.values()))
        return gradients

    @torch.no_grad()
    def _add(self, name: str, x: Tensor, version: int, h: Tensor) -> None:
        if x._version != version:
            raise CaptureError(
                f"the input of {name!r} was changed in place after its forward: its dense gradient cannot be formed. "
                f"Leave this layer out of DirectionProbe(layers=...)."
            )
        # The product that the sketch is taken of has X in the dtype that the layer computed in.
        rows = x.reshape(-1, x.shape[-1]).to(h.dtype).float()
        product = h.reshape(-1, h.shape[-1]).float().T @ rows
        self._totals[name] = self._totals[name].add_(product) if name in self._totals else product


class _Hook:
    """Forward hook of one module. A copied or unpickled module gets one that is inert."""

    def __init__(self, owner: DenseGradients, name: str) -> None:
        self._owner = owner
        self._name = name

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        owner, name = self._owner, self._name
        if not (owner.active and torch.is_grad_enabled() and output.requires_grad):
            return
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
        version = x._version
        output.register_hook(lambda h: owner._add(name, x, version, h))

    def __reduce__(self) -> tuple[type["_InertHook"], tuple[()]]:
        return _InertHook, ()


class _InertHook:
    """What stands for a `_Hook` in a copy of the model."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        return None
