"""The state of GaLore's and APOLLO's optimizers as plain data, and back.

Both packages keep an object per parameter under "projector", whose attributes are numbers, texts and tensors. A checkpoint
holds data, never objects, so the attributes take its place.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

_PROJECTORS = {"galore_torch": ("galore_projector", "GaLoreProjector"),
               "apollo_torch": ("random_projector", "GradientProjector")}  # fmt: skip
"""Package of an optimizer -> module and class of its projectors."""


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with the attributes of projectors in their place; that of any other optimizer as it is."""
    state = optimizer.state_dict()
    if _package(optimizer) not in _PROJECTORS:
        return state
    return state | {"state": {index: _with_projector(entry, vars) for index, entry in state["state"].items()}}


def load_plain_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `plain_state` returned."""
    if (package := _package(optimizer)) not in _PROJECTORS:
        optimizer.load_state_dict(state)
        return
    module, name = _PROJECTORS[package]
    kind: Any = getattr(importlib.import_module(f"{package}.{module}"), name)

    def rebuilt(attributes: dict[str, Any]) -> Any:
        projector = kind.__new__(kind)
        vars(projector).update(attributes)
        return projector

    entries = {index: _with_projector(entry, rebuilt) for index, entry in state["state"].items()}
    optimizer.load_state_dict(state | {"state": entries})
    for parameter, entry in optimizer.state.items():
        # torch moves tensors to the device of their parameter, but not those inside an object.
        attributes = vars(entry["projector"]) if "projector" in entry else {}
        attributes |= {
            name: value.to(parameter.device) for name, value in attributes.items() if isinstance(value, Tensor)
        }


def _package(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


def _with_projector(entry: dict[str, Any], change: Any) -> dict[str, Any]:
    return entry | {"projector": change(entry["projector"])} if "projector" in entry else entry
