"""The diagnostics of `logra train`."""

from dataclasses import dataclass

from logra.diagnostics.direction import DEFAULT_NUM_LAYERS, DEFAULT_NUM_RESPONSES, check_layers
from logra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DiagnosticsConfig:
    """Measurements of some steps, in metrics.jsonl as direction/* (methods logra and paper); see docs/trust.md."""

    direction_every: int = 0
    """Steps between two comparisons of the update with the dense gradient of a few layers; 0 never."""
    direction_layers: int | tuple[str, ...] = DEFAULT_NUM_LAYERS
    """Layers to compare in: names of target modules, or how many, spread evenly over depth and kinds."""
    collateral_every: int = 0
    """Steps between two measurements of the KL on unrelated text per unit of KL on the task; 0 never."""
    collateral_file: str | None = None
    """UTF-8 file of unrelated texts, separated by lines that hold only ---; null takes a few texts of this package."""
    num_responses: int = DEFAULT_NUM_RESPONSES
    """Responses of the step's batch that logit tangents are taken on."""

    def __post_init__(self) -> None:
        for name, least in (("direction_every", 0), ("collateral_every", 0), ("num_responses", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"diagnostics.{name}={value!r}: an integer of at least {least} is allowed")
        check_layers("diagnostics.direction_layers", self.direction_layers)
        if self.collateral_file is not None and not self.collateral_every:
            raise ConfigError(
                f"diagnostics.collateral_file={self.collateral_file!r}: has no effect with diagnostics.collateral_every=0"
            )
        unused = self.direction_layers != DEFAULT_NUM_LAYERS and not self.direction_every
        if unused:
            raise ConfigError(
                f"diagnostics.direction_layers={self.direction_layers!r}: has no effect with diagnostics.direction_every=0"
            )

    @property
    def is_on(self) -> bool:
        """Whether anything is measured."""
        return bool(self.direction_every or self.collateral_every)
