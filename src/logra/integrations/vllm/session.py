"""A worker of a vLLM engine that follows a policy: the one object behind both routes into the engine.

    join      the run's manifest; the engine's weights must be those of its base model
    receive   one packet, whole or not at all; or a part of full weights, whose version counts when the last part is in

Weights can vanish behind the back of a session: vLLM's sleep level 2 drops them, other code loads others into the same
parameters. A session therefore remembers a few elements of every piece, its *witness*, and compares them before it
answers for a version; and it is told of sleep. Either way it says that it needs an anchor.

Contract: that of `logra.sync.Replica`, whose pieces are the engine's parameters. Nothing is reallocated, so pointers that
CUDA graphs captured stay valid. The version advances only after every write.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import PacketError, SyncError
from logra.integrations.vllm.layout import engine_layout
from logra.integrations.vllm.messages import InitInfo, UpdateInfo, opened_anchor, to_bytes
from logra.integrations.vllm.workers import Workers
from logra.sync import Manifest, Piece, Replica, combine_parts
from logra.update import PolicyUpdate

_NUM_WITNESSES = 16
"""Elements of every piece that are remembered."""


class Session:
    """Follows a policy with the weights of one worker.

    Args:
        model: as the worker runs it, loaded.
        workers: all that hold a part of the weights; None for a worker that holds them all.
    """

    def __init__(self, model: nn.Module, workers: Workers | None = None) -> None:
        self._model = model
        self._workers = workers or Workers()
        self._init: InitInfo | None = None
        self._replica: Replica | None = None
        self._refused: Mapping[str, str] = {}
        self._witness = torch.empty(0, dtype=torch.int32)
        self._anchored: set[str] = set()
        self._is_asleep = False

    # ---- what the trainer says ----

    def join(self, info: InitInfo) -> None:
        """Follow a run from its base model on, or go on following it.

        Raises:
            SyncError: the weights are not those of the base model, another run is followed, or the worker is not at the
                expected version. An anchor mends each of them.
        """
        self._together(lambda: self._join(info))

    def receive(self, info: UpdateInfo) -> None:
        """Apply a packet or a part of an anchor.

        Raises:
            PacketError: damaged, or does not fit; nothing has been written.
            SyncError: the engine needs an anchor, or no run was announced.
        """
        self._together(lambda: self._receive(info))

    def state(self) -> dict[str, Any]:
        """run_id and version (None without a run), needs_anchor (None where the weights are sound), storage, and in
        bf16 mode the bound of the drift.
        """
        replica = self._replica
        if replica is None:
            return {"run_id": None, "version": None, "needs_anchor": None}
        if not self._is_asleep:
            self._look_for_loss(replica)
        state = {"run_id": replica.run_id, "version": replica.version, "needs_anchor": replica.needs_anchor}
        state["storage"] = replica.storage
        if replica.storage == "bf16":
            state["drift_bound"] = replica.drift().bound
        return state

    # ---- what the engine says ----

    def fall_asleep(self, *, drops_weights: bool) -> None:
        """The memory of the weights is about to be unmapped."""
        self._is_asleep = True
        if drops_weights and self._replica is not None:
            self._replica.invalidate(
                f"the weights of version {self._replica.version} were dropped when the engine went to sleep (level 2)"
            )

    def awake(self) -> None:
        """The memory of the weights is mapped again."""
        self._is_asleep = False

    # ---- inside ----

    def _together(self, action: Callable[[], str | None]) -> None:
        """Do something on every worker, and let all workers know if it failed on one.

        Args:
            action: on this worker alone; returns the digest that the weights of all workers must have afterwards, or
                None where there is nothing to compare.
        """
        error, expected = None, None
        try:
            expected = action()
        except Exception as caught:
            error = caught
        if self._workers.is_alone:
            if error is not None:
                raise error
            return
        failure = self._workers.first_failure(error)
        if failure is None and expected is not None:
            failure = self._difference(expected)
        if failure is not None:
            if error is None and self._replica is not None:
                self._replica.invalidate(f"a worker of the engine failed: {failure}")
            self._workers.tell(failure)

    def _join(self, info: InitInfo) -> str | None:
        self._require_awake()
        self._init = info
        manifest = Manifest.from_json(info.manifest)
        if info.anchor_follows:
            return None
        replica = self._replica
        if replica is None and info.expect_version is None:
            return self._begin(manifest, info)
        if replica is None or replica.run_id != manifest.run_id:
            follows = "no run" if replica is None else f"run {replica.run_id!r}"
            raise SyncError(f"the engine follows {follows}, not run {manifest.run_id!r}; it needs an anchor")
        self._look_for_loss(replica)
        _require_sound(replica)
        expected = manifest.base.version if info.expect_version is None else info.expect_version
        if replica.version != expected:
            raise SyncError(f"the engine is at version {replica.version}, not {expected}")
        return None

    def _begin(self, manifest: Manifest, info: InitInfo) -> str | None:
        """Follow a run with weights that are said to be its base model."""
        replica = self._new_replica(manifest, info)
        if self._workers.is_alone:
            replica.catch_up(_Announcement(manifest))  # pyright: ignore[reportArgumentType]
        self._replica = replica
        self._witness = witness(self._pieces())
        return None if replica.storage == "bf16" else manifest.base.digest

    def _receive(self, info: UpdateInfo) -> str | None:
        self._require_awake()
        if self._init is None:
            raise SyncError("the engine follows no run: send init_info first")
        if info.packet is not None:
            return self._apply(PolicyUpdate.from_bytes(to_bytes(info.packet)))
        assert info.version is not None
        self._load(opened_anchor(info), info.version, info.is_last, self._init)
        return None

    def _apply(self, update: PolicyUpdate) -> str | None:
        replica = self._replica
        if replica is None:
            raise SyncError("the engine needs an anchor: its weights were not those of the run's base model")
        self._refuse(sorted(update.names))
        self._look_for_loss(replica)
        self._place_low_planes(replica)
        try:
            replica.apply(update)
        finally:
            # Reads from the device, and so waits until everything is written.
            self._witness = witness(self._pieces())
        return None if replica.storage == "bf16" else update.weights_digest

    def _load(self, weights: Mapping[str, Tensor], version: int, is_last: bool, info: InitInfo) -> None:
        manifest = Manifest.from_json(info.manifest)
        if self._replica is None or self._replica.run_id != manifest.run_id:
            self._replica = self._new_replica(manifest, info)
            self._replica.invalidate("it has the weights of no version yet")
        replica = self._replica
        self._refuse(weights)
        self._place_low_planes(replica)
        replica.load(weights, version)
        self._anchored |= weights.keys()
        self._witness = witness(self._pieces())
        missing = sorted(replica.layout.keys() - self._anchored)
        if missing:
            replica.invalidate(f"the anchor of version {version} is not complete: {missing[0]!r} is missing")
        if is_last:
            self._anchored = set()
            _require_sound(replica)

    def _new_replica(self, manifest: Manifest, info: InitInfo) -> Replica:
        layout = engine_layout(self._model)
        self._refused = layout.refused
        dtypes = {piece.tensor.dtype for placement in layout.placements.values() for piece in placement.pieces}
        storage = "fp32"
        if torch.bfloat16 in dtypes:
            exact = "split24" if manifest.weight_storage == "split24" else "split32"
            storage = "bf16" if info.storage == "bf16" else exact
        return Replica(layout.placements, manifest.base.version, storage, run_id=manifest.run_id)

    def _difference(self, expected: str) -> SyncError | None:
        """Compare the digest over all workers with the trainer's; all come to the same answer."""
        assert self._replica is not None
        try:
            found = combine_parts(
                part for parts in self._workers.gather(self._replica.digest_parts()) for part in parts
            )
        except SyncError as error:
            return error
        if found == expected:
            return None
        return SyncError(f"its weights are not the trainer's (digest {found:.12}..., expected {expected:.12}...)")

    def _require_awake(self) -> None:
        if self._is_asleep:
            raise SyncError("the engine sleeps: wake it up first, its weights are not in memory")

    def _refuse(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._refused:
                raise PacketError(f"update: {name!r} cannot be changed in this engine: {self._refused[name]}")

    def _look_for_loss(self, replica: Replica) -> None:
        if replica.needs_anchor is None and not torch.equal(witness(self._pieces()), self._witness):
            replica.invalidate(f"something else wrote into the weights of version {replica.version}, or they were lost")

    def _place_low_planes(self, replica: Replica) -> None:
        """Before anything is written, by an update or an anchor: where the low planes go that the replica will make."""
        assert self._init is not None
        for piece in _pieces_of(replica):
            piece.low_on_host = self._init.low_plane == "host"

    def _pieces(self) -> list[Piece]:
        assert self._replica is not None
        return _pieces_of(self._replica)


def _pieces_of(replica: Replica) -> list[Piece]:
    return [piece for placement in replica.layout.values() for piece in placement.pieces]


def _require_sound(replica: Replica) -> None:
    if replica.needs_anchor is not None:
        raise SyncError(f"the engine needs an anchor: {replica.needs_anchor}")


def witness(pieces: Iterable[Piece]) -> Tensor:
    """A few elements of every piece, as bits: NaN must equal itself.

    Returns:
        int32 [elements], on the CPU.
    """
    samples = [
        piece.tensor[_positions(*piece.tensor.shape, str(piece.tensor.device))]
        for piece in pieces
        if piece.num_elements > 0
    ]
    bits = [sample.to(torch.float32).view(torch.int32) for sample in samples]
    return torch.cat(bits).cpu() if bits else torch.empty(0, dtype=torch.int32)


@lru_cache(maxsize=256)
def _positions(num_rows: int, num_columns: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows and columns of scattered elements of a matrix; primes keep them off each other's rows and columns."""
    index = torch.arange(_NUM_WITNESSES, device=device)
    return (index * 7919) % num_rows, (index * 104729) % num_columns


class _Announcement:
    """A log that has just begun: catching up with it compares a replica with the base model of the manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def latest(self) -> int:
        return self.manifest.base.version

    def read_since(self, version: int) -> Iterable[PolicyUpdate]:
        return ()
