"""Checks of the options of benchmarks."""

import math
from collections.abc import Iterable

from logra.errors import ConfigError


def require_known(field: str, values: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse a value that is not among those a field may hold.

    Raises:
        ConfigError: with the first such value, and what is allowed.
    """
    names = tuple(allowed)
    for value in values:
        if value not in names:
            raise ConfigError(f"{field}={value!r}: any of {', '.join(names)}")


def require_positive(options: object, *fields: str) -> None:
    """Refuse numbers that are not above 0, in fields that hold a number or several.

    Raises:
        ConfigError: with the first such field.
    """
    for field in fields:
        value = getattr(options, field)
        if not all(0 < number < math.inf for number in (value if isinstance(value, tuple) else (value,))):
            raise ConfigError(f"{field}={value!r}: a finite number above 0")
