"""The contracts between the parts of `logra.sync`: what a log is, and what a publisher needs to know of an optimizer."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from logra.sketch.targets import Target
from logra.sync.manifest import Manifest
from logra.update import PolicyUpdate


class UpdateLog(Protocol):
    """An append-only sequence of updates: version base + 1, base + 2, ... without gaps, all of one run."""

    @property
    def manifest(self) -> Manifest | None:
        """What the log says about itself; None before `start`."""
        ...

    def start(self, manifest: Manifest) -> None:
        """Make an empty log one of this run. Does nothing where it has this manifest already; refuses another."""
        ...

    def append(self, update: PolicyUpdate) -> int:
        """Add the next update; returns its size in bytes, and only when it is durable. Appending the same content
        again does nothing, so an append whose answer was lost can be repeated; anything else is refused.
        """
        ...

    def read_since(self, version: int) -> Iterator[PolicyUpdate]:
        """The updates after `version` that the log holds now, in order; each is checked when it is reached."""
        ...

    def latest(self) -> int:
        """The newest version; that of the base model where there is no update yet."""
        ...


@runtime_checkable
class AnchorSource(Protocol):
    """A log that has full weights at some versions, so that catching up takes bounded time."""

    def latest_anchor(self, at_most: int) -> int | None:
        """The newest version up to `at_most` that has an anchor."""
        ...

    def read_anchor(self, version: int) -> dict[str, Tensor]:
        """The weights of an anchor, on the CPU, checked."""
        ...


@runtime_checkable
class AnchorStore(AnchorSource, Protocol):
    """A log in which a publisher can put them."""

    def write_anchor(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Store all weights that the run may change, as they are at `version`; durable on return."""
        ...


class PolicyOptimizer(Protocol):
    """What a publisher reads of the optimizer: `logra.SketchOptimizer` has it."""

    model: nn.Module
    targets: tuple[Target, ...]
    config: Any
    state: Any

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        ...
