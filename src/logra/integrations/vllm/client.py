"""`EngineClient`: what a trainer needs of a rollout engine, over whatever leads to it.

    attach(manifest)   the engine follows the run from its base model on
    push(update)       one update; acknowledged after it was applied
    catch_up(log)      all updates that the engine does not have
    load(weights)      full weights, for an engine that lost its own or began from others
    version()          what the engine has; None if it has no version that anybody could build on

After each of these that changes weights the engine's prefix cache is empty. Errors are those of `logra.sync.Replica`:
`PacketError` if the packet is wrong (the engine keeps its version), `SyncError` if the engine is (it needs `load`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from safetensors.torch import save
from torch import Tensor

from logra.errors import SyncError
from logra.integrations.vllm.messages import EngineStorage, InitInfo, LowPlane, anchor_info, hearing_errors
from logra.sync import Manifest
from logra.sync.protocols import UpdateLog
from logra.update import PolicyUpdate

ANCHOR_PART_BYTES = 2**26
"""Full weights travel in parts of about this size; a larger tensor is a part of its own."""


class NoAnswerError(SyncError):
    """The engine could not be reached, or failed without saying whether it did what was asked."""


class Transport(Protocol):
    """Carries messages to all workers of an engine. Methods raise what the workers raise, or `NoAnswerError`."""

    def init(self, info: dict[str, Any]) -> None:
        """Deliver init_info."""
        ...

    def update(self, infos: Iterator[dict[str, Any]], version_name: str) -> None:
        """Deliver update_info objects as one round, let the engine take over the name, and empty its prefix cache."""
        ...

    def version_name(self) -> str | None:
        """The name that the weights were given last; None if the engine knows none."""
        ...

    def take_over(self, version_name: str) -> None:
        """Give weights that are in place their name, empty the prefix cache, and let the engine go on."""
        ...


@dataclass(frozen=True)
class Delivery:
    """What bringing an engine up to date took.

    Attributes:
        version: of the engine afterwards.
        num_bytes: of packets and anchors, before any encoding for transport.
        seconds: from the first byte to the acknowledgement.
    """

    version: int
    num_bytes: int
    seconds: float


class EngineClient(ABC):
    """Keeps an engine on the versions of a run.

    Args:
        storage: "exact" or "bf16", see `messages.InitInfo`.
        low_plane: where an engine with bf16 weights keeps the low plane.

    Raises:
        SyncError: an option that is not allowed.
    """

    def __init__(self, *, storage: EngineStorage = "auto", low_plane: LowPlane = "host") -> None:
        # Checked here as well: what a worker of several cannot even read, it can only refuse by raising (see `workers`).
        InitInfo(manifest="", storage=storage, low_plane=low_plane)
        self._options = {"storage": storage, "low_plane": low_plane}
        self.manifest: Manifest | None = None
        """Of the run that the engine was told of last."""
        self.last_delivery: Delivery | None = None

    @property
    @abstractmethod
    def transport(self) -> Transport:
        """The way to the engine."""

    def attach(self, manifest: Manifest) -> int:
        """Let the engine follow a run, from its base model on; does nothing where it follows it already.

        Args:
            manifest: of the run, e.g. `publisher.log.manifest`.

        Returns:
            The engine's version.

        Raises:
            SyncError: its weights are not those of the base model, or it follows another run: `load` mends it.
        """
        self.manifest = manifest
        version = self.version()
        if version is not None:
            return version
        self._init(manifest)
        self.transport.take_over(version_name(manifest, manifest.base.version))
        return manifest.base.version

    def push(self, update: PolicyUpdate) -> int:
        """Send one update, and wait until the engine has applied it.

        Args:
            update: from the engine's version; it carries the run id of the manifest, as `Publisher.publish` returns it.

        Returns:
            The engine's version: that of the update.

        Raises:
            PacketError: it does not follow the engine's version, belongs to another run, is damaged, or does not fit.
            SyncError: the engine needs an anchor, or (`NoAnswerError`) did not answer and does not have the version.
        """
        manifest = self._manifest()
        packet = update.to_bytes()
        start = time.perf_counter()
        try:
            self._deliver(iter([{"packet": packet}]), update.version)
        except NoAnswerError:
            # The answer was lost, or never given. An update that arrived counts: it could not be applied twice.
            if not self._is_at(manifest, update.version):
                raise
            self.transport.take_over(version_name(manifest, update.version))
        self.last_delivery = Delivery(update.version, len(packet), time.perf_counter() - start)
        return update.version

    def catch_up(self, log: UpdateLog) -> int:
        """Send every update of the log that the engine does not have.

        Returns:
            The engine's version.

        Raises:
            SyncError: the engine has no version, or belongs to another run. See `push` for the rest.
        """
        if log.manifest is None:
            raise SyncError("catch_up: the log has not begun")
        version = self.attach(log.manifest)
        for update in log.read_since(version):
            version = self.push(update)
        return version

    def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Give the engine full weights.

        Args:
            weights: {canonical name: weight} of every weight of the model, in fp32 where the trainer has fp32.
            version: of these weights, in the run of `attach`.

        Returns:
            The engine's version.

        Raises:
            PacketError: a name, shape or dtype that the engine does not have.
            SyncError: the engine did not take over all weights; it has no version then.
        """
        manifest = self._manifest()
        start = time.perf_counter()
        num_bytes = 0

        def parts() -> Iterator[dict[str, Any]]:
            nonlocal num_bytes
            pending = anchor_parts(weights, ANCHOR_PART_BYTES)
            part = next(pending, {})
            while True:
                following = next(pending, None)
                data = save(part)
                num_bytes += len(data)
                yield anchor_info(data, version, is_last=following is None)
                if following is None:
                    return
                part = following

        self._init(manifest, anchor_follows=True)
        self._deliver(parts(), version)
        self.last_delivery = Delivery(version, num_bytes, time.perf_counter() - start)
        return version

    def version(self) -> int | None:
        """The engine's version in the run of `attach`; None if it follows another run or none, or needs an anchor.

        Raises:
            NoAnswerError: the engine cannot be reached.
        """
        manifest = self._manifest()
        run_id, _, number = (self.transport.version_name() or "").rpartition(":")
        if run_id != manifest.run_id or not number.isdecimal() or not self._is_at(manifest, int(number)):
            return None
        return int(number)

    # ---- inside ----

    def _is_at(self, manifest: Manifest, version: int) -> bool:
        """Whether every worker follows the run, is at this version, and has the weights of it."""
        try:
            self._init(manifest, expect_version=version)
        except NoAnswerError:
            raise
        except SyncError:
            return False
        return True

    def _manifest(self) -> Manifest:
        if self.manifest is None:
            raise SyncError("the engine follows no run yet: call attach(manifest) first")
        return self.manifest

    def _init(self, manifest: Manifest, **fields: Any) -> None:
        with hearing_errors():
            self.transport.init({"manifest": manifest.to_json(), **self._options, **fields})

    def _deliver(self, infos: Iterator[dict[str, Any]], version: int) -> None:
        with hearing_errors():
            self.transport.update(infos, version_name(self._manifest(), version))


def version_name(manifest: Manifest, version: int) -> str:
    """What vLLM calls the weights of a version; it stands on everything that is sampled from them."""
    return f"{manifest.run_id}:{version}"


def anchor_parts(weights: Mapping[str, Tensor], part_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Split full weights into parts of at most `part_bytes` (or one tensor), as contiguous CPU tensors."""
    part: dict[str, Tensor] = {}
    size = 0
    for name in sorted(weights):
        tensor = weights[name].detach()
        num_bytes = tensor.numel() * tensor.element_size()
        if part and size + num_bytes > part_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor.cpu().contiguous()
        size += num_bytes
    if part:
        yield part
