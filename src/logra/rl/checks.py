"""Checks of configuration values, shared by the dataclasses of `logra.rl`: a value that is not allowed is named."""

import math
from typing import Any, Literal, get_args, get_origin

from logra.errors import ConfigError


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Raise a ConfigError that says which values of `name` are allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{name}={value!r}: {allowed}")


def require_integer(name: str, value: Any, least: int, unit: str = "") -> None:
    """An integer of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= least, name, value, f"an integer of at least {least}{unit and f' ({unit})'}")


def require_number(name: str, value: Any, *, above: float | None = None) -> None:
    """A finite number above `above`; None: of at least 0."""
    finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    require(
        finite and (value >= 0 if above is None else value > above),
        name,
        value,
        f"a finite number {'of at least 0' if above is None else f'above {above:g}'}",
    )


def require_choices(config: Any, prefix: str = "") -> None:
    """Every field that lists its values holds one of them. The command line checks this too, Python does not."""
    for name, kind in type(config).__annotations__.items():
        if get_origin(kind) is Literal:
            allowed = get_args(kind)
            require(
                getattr(config, name) in allowed, prefix + name, getattr(config, name), f"one of {', '.join(allowed)}"
            )
