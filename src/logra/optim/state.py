"""Saving and loading the optimizer's state: which settings it depends on, and how its tensors come back unchanged."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from logra.errors import ConfigError
from logra.optim.config import Config

_BINDING = ("seed", "rank", "sketch", "side", "input_scaling", "direction", "refresh_every", "weight_storage")
"""Settings that the saved tensors depend on, by shape or by meaning."""


_MOMENTS = ("step", "moment_exponents", "momentum", "exp_avg_sq")
"""How the names begin of what a target remembers of past gradients."""


def drop_moments(state: dict[str, Any]) -> None:
    """Remove one target's memory of past gradients, in place; low plane and input scales stay."""
    for name in [name for name in state if name.startswith(_MOMENTS)]:
        del state[name]


def binding_settings(config: Config) -> dict[str, Any]:
    """The settings that must be the same where the state is loaded, as plain scalars."""
    return {name: getattr(config, name) for name in _BINDING} | {"has_momentum": config.momentum > 0}


def check_groups(own: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """Refuse the param_groups of another optimizer.

    Raises:
        ConfigError: other parameters, or other settings that the state depends on.
    """
    if not all("fqns" in group for group in saved) or not saved or "settings" not in saved[0]:
        raise ConfigError("load_state_dict: the state was not saved by a SketchOptimizer")
    for name in ("fqns", "shapes"):
        if [group[name] for group in saved] != [group[name] for group in own]:
            raise ConfigError("load_state_dict: the state was saved for other parameters than those of this optimizer")
    expected, found = own[0]["settings"], saved[0]["settings"]
    different = [
        f"{name}={found.get(name)!r} (here {value!r})" for name, value in expected.items() if found.get(name) != value
    ]
    if different:
        raise ConfigError(
            f"load_state_dict: the state was saved with {', '.join(different)}. Build the optimizer with the saved settings, "
            f"or start without its state."
        )


def on_device_of(parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Copies of one parameter's state on its device; dtypes stay what they are, and scalars (AdamW's step) where they are."""
    return {
        name: value.to(parameter.device if value.ndim else value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }
