"""Saving and loading the optimizer's state: which settings it depends on, and how its tensors come back unchanged."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from logra import distributed
from logra.errors import ConfigError
from logra.optim.config import Config

_BINDING = ("seed", "rank", "sketch", "side", "input_scaling", "direction", "refresh_every", "weight_storage")
"""Settings that the saved tensors depend on, by shape or by meaning."""


SHARE = "moments_of_process"
"""In the first group of a state dict in a run of several: [process, their number]; absent where all moments are in it."""
Share = tuple[int, int]
"""(process, their number): whose moments these are."""
_MOMENTS = ("step", "moment_exponents", "momentum", "exp_avg_sq")
"""How the names begin of what a target remembers of past gradients."""


def is_moment(name: str) -> bool:
    """Whether a target's state of this name is memory of past gradients, which its owner alone has."""
    return name.startswith(_MOMENTS)


def moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """One target's memory of past gradients."""
    return {name: value for name, value in state.items() if is_moment(name)}


def drop_moments(state: MutableMapping[str, Any]) -> None:
    """Remove one target's memory of past gradients, in place; low plane and input scales stay."""
    for name in moments(state):
        del state[name]


def live_share() -> Share:
    """That of this process in the present process group; (0, 1) without one."""
    return distributed.rank(), distributed.num_processes()


def binding_settings(config: Config) -> dict[str, Any]:
    """The settings that must be the same where the state is loaded, as plain scalars."""
    settings = {name: getattr(config, name) for name in _BINDING} | {"has_momentum": config.momentum > 0}
    # The average of gradient norms begins with the momentum: it cannot join later.
    return settings | ({"coherence_scaling": True} if config.coherence_scaling else {})


def check_share(group: Mapping[str, Any]) -> None:
    """Refuse a state that lacks moments which this process owns.

    Args:
        group: the first saved one; `SHARE` in it names the process of a run of several that saved its own part.

    Raises:
        ConfigError: another process, or one of another number, saved it after its first update.
    """
    share, own = group.get(SHARE), live_share()
    if share is not None and tuple(share) != own and group["version"] > 0:
        raise ConfigError(
            f"load_state_dict: the state is that of process {share[0]} of {share[1]}, which has the moments of its own "
            f"targets alone; this is process {own[0]} of {own[1]}. Save whole_state_dict() on all processes, or use "
            f"logra.checkpoint.save_sharded"
        )


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
