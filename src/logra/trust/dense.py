"""Puts dense changes of parameters into a forward without writing them.

Targets change by thin factors, see `injection`. Everything else that moves in a step (embeddings, norms, biases under an
inner AdamW; all weights of a dense baseline; LoRA's adapters) has a dense displacement d, p <- p - d. Inside
`DenseInjection` the modules see p - d (`mode="value"`), or p with the forward tangent -d (`mode="tangent"`), whatever
operation reads the parameter.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


class DenseInjection:
    """Context manager that swaps parameters for changed ones. May be entered again and again.

    Args:
        model: every module of it that holds one of the parameters sees the change, tied ones too.
        displacements: parameter -> what is subtracted from it, of its shape, any floating dtype.
        mode: "value" or "tangent" (entered inside a `forward_ad.dual_level`).
    """

    def __init__(
        self, model: nn.Module, displacements: Mapping[nn.Parameter, Tensor], mode: Literal["value", "tangent"]
    ) -> None:
        self.displacements = displacements
        self.mode = mode
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in displacements
        ]

    def __enter__(self) -> "DenseInjection":
        changed = {parameter: self._changed(parameter) for parameter in self.displacements}
        for module, name, parameter in self._places:
            # The dictionary itself: `setattr` takes nn.Parameters only, and a new key would change the order.
            module._parameters[name] = changed[parameter]  # type: ignore[assignment]
        return self

    def __exit__(self, *exc: object) -> None:
        for module, name, parameter in self._places:
            module._parameters[name] = parameter

    def _changed(self, parameter: nn.Parameter) -> Tensor:
        displacement = self.displacements[parameter]
        if self.mode == "tangent":
            return forward_ad.make_dual(parameter.detach(), -displacement.to(parameter.dtype))
        # fp32 at least: a change below the spacing of bfloat16 must not vanish.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return parameter.detach().to(dtype) - displacement.to(dtype)
