"""How often a run is saved, and how much of it is kept."""

from dataclasses import dataclass

from logra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a run, from which --resume continues it exactly."""

    every: int = 20
    """Steps between two checkpoints; one is also written after the last step and on a stop. 0 writes none at all."""
    keep: int = 2
    """Newest checkpoints that are kept, at least 1."""
    max_bytes: int | None = None
    """Delete older checkpoints while all together are larger than this, bytes; the newest is always kept. null: no limit."""

    def __post_init__(self) -> None:
        for name, least, unit in (("every", 0, "steps"), ("keep", 1, "checkpoints"), ("max_bytes", 1, "bytes")):
            value = getattr(self, name)
            if name == "max_bytes" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"checkpoints.{name}={value!r}: an integer of at least {least} ({unit})")
