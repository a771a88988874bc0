"""The run folder as the processes see it that do not write it: process 0 does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from logra.rl.config import TrainConfig
from logra.rl.run_folder import RunFolder


class FollowedFolder(RunFolder):
    """A `RunFolder` that reads where things lie, and whose writes do nothing.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._name_parts(Path(path))

    def require_outside(self, field: str, source: str | Path) -> None:
        """Process 0 asks."""

    def create(self) -> None:
        """Process 0 does."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Process 0 holds the lock."""
        yield

    def require_space(self, num_bytes: int) -> None:
        """Process 0 asks."""

    def positions(self) -> dict[str, int]:
        """None: process 0 knows them."""
        return {}

    def reopen(self, positions: Mapping[str, int]) -> list[str]:
        """Process 0 does."""
        return []

    def steps(self, positions: Mapping[str, int]) -> list[dict[str, Any]]:
        """None: process 0 reads them."""
        return []

    def write_model(self, write: Callable[[Path], None]) -> None:
        """Process 0 does."""

    def write_config(self, config: TrainConfig) -> None:
        """Process 0 does."""

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Process 0 does."""

    def add_sample(self, sample: Mapping[str, Any]) -> None:
        """Process 0 does."""

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Process 0 does."""

    def write_memory(self, content: Mapping[str, Any]) -> None:
        """Process 0 does."""

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Process 0 does."""
