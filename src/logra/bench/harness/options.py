"""Checks of the options of benchmarks."""

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
