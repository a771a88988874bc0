"""`Replica`: weights that follow a policy, update by update.

It merges an update exactly as the trainer did: W <- fl(fl(W · decay) - ΔW), ties nudged or the result rounded to 24 bits
where the merge rule of the run says so, on whole weights or on the pieces of an engine. With storage `fp32`, `split32` or
`split24` its weights are, after every update, the trainer's bit for bit. With `bf16` low-rank updates have no low plane:
every merge rounds to bf16, and the replica says how far it may have drifted.

Contract: an update is applied whole or not at all. Versions, run, names, shapes, dtypes and ranges are checked for all
tensors before the first is written, and the version advances after the last. If writing itself is interrupted, or if a
digest shows that the weights are not the trainer's, the replica refuses every further update until it is given an anchor.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from logra.errors import LograError, PacketError, SyncError
from logra.merge_rule import MergeRule
from logra.shards import reshard
from logra.storage import LOW_DTYPES, apply_update_, narrowed
from logra.sync import fit
from logra.sync.digest import ChecksumPart
from logra.sync.drift import Drift, DriftLedger
from logra.sync.fit import Storage
from logra.sync.layout import Layout, Piece, Placement, canonical_weights, module_layout, weights_digest
from logra.sync.manifest import BaseModel
from logra.sync.protocols import AnchorSource, UpdateLog
from logra.tensor_delta import TensorDelta
from logra.update import LowRankUpdate, PolicyUpdate, row_blocks

_ANCHOR_DISTANCE = 64
"""Catching up by more updates than this starts from an anchor, if the log has a newer one."""


class Replica:
    """A copy of the policy that applies updates in place.

    Args:
        model: a module with the weights of `version`, whose parameters may be DTensors of FSDP2 or tensor parallelism (every
            rank then has a replica and applies every update), or a layout of pieces (fused tensors of an engine).
        version: policy version of these weights.
        storage: "fp32" for fp32 parameters; "split32" for bf16 parameters and a low plane of 16 bits that the replica
            keeps; "split24", in runs with that merge rule, for a low plane of 8 bits; "bf16" for bf16 parameters alone,
            whose drift is measured and reported.
        run_id: refuse updates of other runs; "" takes the run of the first update or log.

    Raises:
        LograError: a parameter that no replica can hold (quantised, on the meta device), by name.
        SyncError: no matrix of the model has the dtype of the storage.

    Example:
        >>> replica = logra.sync.Replica(other_model, version=0)
        >>> replica.apply(update)
        >>> replica.catch_up(logra.sync.DirectoryLog("run/updates"))
    """

    def __init__(
        self, model: nn.Module | Layout, version: int = 0, storage: Storage = "fp32", *, run_id: str = ""
    ) -> None:
        if storage not in fit.PLANE_DTYPE:
            raise SyncError(f"Replica: storage is {storage!r}; allowed are {', '.join(fit.PLANE_DTYPE)}")
        if not isinstance(version, int) or version < 0:
            raise SyncError(f"Replica: version is {version!r}; allowed are integers of at least 0")
        self.layout: dict[str, Placement] = module_layout(model) if isinstance(model, nn.Module) else dict(model)
        self._model = model if isinstance(model, nn.Module) else None
        self.storage: Storage = storage
        self.version = version
        self.run_id = run_id
        self.needs_anchor: str | None = None
        """Why the replica refuses updates until `load` gives it an anchor; None while it is sound."""
        self.verified_version: int | None = None
        """The last version at which a digest showed that the weights are the trainer's; None before the first."""
        self._seed: int | None = None
        self._weight_storage: str | None = None
        self._checked_base = False
        self._magnitudes: dict[str, float] = {}
        self._drift = DriftLedger(self.layout) if storage == "bf16" else None
        self._check_dtypes()

    # ---- applying ----

    @torch.no_grad()
    def apply(self, update: PolicyUpdate) -> None:
        """Apply the next update, whole or not at all.

        Args:
            update: from `base_version` = the version of the replica.

        Raises:
            PacketError: it is a duplicate, leaves a gap, belongs to another run, seed or merge rule, or does not fit the
                weights: nothing has been written, and the right update can be applied next. Also if the digest in it
                shows that the weights are not the trainer's: then `needs_anchor` is set.
            SyncError: the replica needs an anchor.
        """
        self._reshard()
        self._check(update)
        self.needs_anchor = f"applying version {update.version} was interrupted"
        for name, weight in update.weights.items():
            rule = MergeRule.of(update.weight_storage, seed=update.seed, version=update.version, name=name)
            for piece in self.layout[name].pieces:
                self._merge(name, piece, weight, rule)
        for name, tensor in update.tensors.items():
            placement = self.layout[name]
            self._write(name, fit.canonical(tensor, placement), placement, keep_low=True)
        for name, delta in update.deltas.items():
            self._move(name, fit.canonical_delta(delta, self.layout[name]))
        self.needs_anchor = None
        self.version = update.version
        self.run_id, self._seed, self._weight_storage = update.run_id, update.seed, update.weight_storage
        self._verify(update)

    def catch_up(self, log: UpdateLog, until: int | None = None) -> int:
        """Apply what the log holds beyond the version of the replica; call it again to follow the log.

        Starts from an anchor of the log if the replica needs one, or if that saves more than 64 updates. A bf16 replica
        also takes over the newest anchor when it comes to its version, and measures its drift there.

        Args:
            log: of the run.
            until: stop at this version; None for the newest.

        Returns:
            Number of updates applied.

        Raises:
            SyncError: another run, merge rule or base model, or the log cannot continue this version.
            PacketError: an update is damaged or does not fit. The replica stays at the last version that was right.
        """
        manifest = log.manifest
        if manifest is None:
            raise SyncError("catch_up: the log has not begun: nothing has been published, or its address is wrong")
        if self.run_id not in ("", manifest.run_id):
            raise SyncError(
                f"catch_up: the log belongs to run {manifest.run_id!r}, the replica follows {self.run_id!r}"
            )
        latest = log.latest()
        target = latest if until is None else until
        if target > latest or (target < self.version and self.needs_anchor is None):
            raise SyncError(
                f"catch_up: the replica is at version {self.version}, the log at {latest}, asked for {target}"
            )
        self._check_rule(manifest.weight_storage, "catch_up: the log's", SyncError)
        self._check_base(manifest.base)
        self.run_id, self._seed, self._weight_storage = manifest.run_id, manifest.seed, manifest.weight_storage
        anchor = self._start_from_anchor(log, target)
        num_applied = 0
        for update in log.read_since(self.version) if self.version < target else ():
            self.apply(update)
            num_applied += 1
            if self.storage == "bf16" and anchor is not None and update.version == anchor:
                assert isinstance(log, AnchorSource)
                self.load(log.read_anchor(anchor), anchor)
            if update.version == target:
                break
        return num_applied

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over full weights: an anchor, or a base model in fp32 for a replica of bf16 parameters.

        Args:
            weights: {name: canonical weight}; at least every weight that updates change. Weights that are not named
                keep their values.
            version: of these weights.

        Raises:
            PacketError: a name, shape or dtype that does not fit; nothing has been written.
        """
        self._reshard()
        for name, value in weights.items():
            if name not in self.layout:
                raise PacketError(f"load: {name!r} is no weight of this replica")
            fit.check_tensor(name, value, self.layout[name], self.storage)
        if self._drift is not None and self.needs_anchor is None and version == self.version:
            self._drift.measure(weights, version)
        self.needs_anchor = f"loading version {version} was interrupted"
        for name, value in weights.items():
            placement = self.layout[name]
            had_low = any(piece.lo is not None for piece in placement.pieces)
            self._write(name, value, placement, keep_low=had_low or self.storage in LOW_DTYPES)
        self.needs_anchor = None
        self.version = version

    def invalidate(self, reason: str) -> None:
        """Say that the weights are lost (the engine dropped them, or restarted): updates are refused until `load`.

        What no anchor holds (frozen weights) the engine must load from the base model first.
        """
        self.needs_anchor = reason

    # ---- reading ----

    def weights(self) -> dict[str, Tensor]:
        """{name: canonical weight}, fp32 where there is a low plane; views of the parameters where possible.

        Raises:
            LograError: only a part of the weights lives here.
        """
        return canonical_weights(self.layout)

    def digest(self) -> str | None:
        """The digest of all weights; None if only a part of them lives here (see `digest_parts`)."""
        return weights_digest(self.layout)

    def digest_parts(self) -> list[ChecksumPart]:
        """Checksums of the pieces here; `combine_parts` makes the digest of all weights from those of all ranks."""
        return [
            ChecksumPart(name, placement.shape, piece.rows, piece.columns, piece.checksum())
            for name, placement in self.layout.items()
            for piece in placement.pieces
        ]

    def drift(self) -> Drift:
        """How far the weights may be, and at the last anchor were, from the trainer's. Zero with exact storage."""
        return Drift(version=self.version) if self._drift is None else self._drift.report(self.version)

    # ---- inside ----

    def _reshard(self) -> None:
        if self._model is not None:
            reshard(self._model)

    def _check(self, update: PolicyUpdate) -> None:
        if self.needs_anchor is not None:
            raise SyncError(f"the replica cannot apply updates: {self.needs_anchor}. Give it an anchor with load()")
        for name, own in (
            ("run_id", self.run_id or None),
            ("seed", self._seed),
            ("weight_storage", self._weight_storage),
        ):
            if own is not None and getattr(update, name) != own:
                raise PacketError(f"update: {name} is {getattr(update, name)!r}; this replica follows {own!r}")
        self._check_rule(update.weight_storage, "update:", PacketError)
        if update.base_version != self.version:
            kind = "it has been applied already" if update.version <= self.version else "updates in between are missing"
            raise PacketError(
                f"update: leads from version {update.base_version} to {update.version}, the replica is at "
                f"{self.version}: {kind}; catch_up(log) applies what is missing"
            )
        fit.check_fit(update, self.layout, self.storage)
        self._check_magnitudes(update)

    def _check_rule(self, weight_storage: str, whose: str, error: type[LograError]) -> None:
        if self.storage == "split24" and weight_storage != "split24":
            raise error(
                f"{whose} weight_storage is {weight_storage!r}; a replica with storage='split24' holds weights of 24 bits, "
                f"which only runs with weight_storage='split24' have. Use storage='split32'"
            )

    def _check_magnitudes(self, update: PolicyUpdate) -> None:
        """Refuse an update after which a weight might not be finite. Bounds are kept, so weights are rarely read."""
        bounds = {}
        for name, weight in update.weights.items():
            change = fit.largest_change(weight)
            bound = self._magnitudes.get(name, math.inf) + change
            if not bound < fit.MAGNITUDE_LIMIT:
                bound = fit.largest_value(self.layout[name]) + change
            if not bound < fit.MAGNITUDE_LIMIT:
                raise PacketError(f"update: {name!r} could reach {bound:g}; allowed is below {fit.MAGNITUDE_LIMIT:g}")
            bounds[name] = bound
        self._magnitudes |= bounds

    def _merge(self, name: str, piece: Piece, weight: LowRankUpdate, rule: MergeRule) -> None:
        if self._drift is not None:
            self._drift.merge(name, piece, weight, rule)
            return
        low_dtype = LOW_DTYPES.get(self.storage)
        if low_dtype is not None:
            piece.add_low(low_dtype)
        apply_update_(weight, piece.tensor, piece.lo, rows=piece.rows, columns=piece.columns, rule=rule)
        if low_dtype == torch.int8 and piece.lo is not None and piece.lo.dtype == torch.int16:
            piece.lo = narrowed(piece.lo)  # of an anchor; the merge has rounded every value to 24 bits

    def _move(self, name: str, delta: TensorDelta) -> None:
        """Move a tensor by its delta. From here on its bf16 pieces have a low plane, also with storage bf16."""
        placement = self.layout[name]
        for piece in placement.pieces:
            part = fit.part_of_delta(delta, placement, piece)
            for start, stop in row_blocks((piece.tensor.shape[0], piece.tensor.shape[1])):
                piece.write(piece.moved(part, start, stop), keep_low=True, start=start)
        self._magnitudes.pop(name, None)
        if self._drift is not None:
            self._drift.moved(name)

    def _write(self, name: str, value: Tensor, placement: Placement, *, keep_low: bool) -> None:
        for piece in placement.pieces:
            piece.write(fit.part_of(value, placement, piece), keep_low=keep_low)
        self._magnitudes.pop(name, None)
        if self._drift is not None:
            self._drift.replaced(name, value, placement)

    def _verify(self, update: PolicyUpdate) -> None:
        if update.weights_digest is None:
            return
        found = self.digest()
        if found is None:
            return  # a rank alone cannot tell: see digest_parts
        if self._drift is not None:
            self._drift.compared(update.version, found == update.weights_digest)
        elif found != update.weights_digest:
            self.needs_anchor = f"its weights at version {update.version} are not the trainer's (digest {found:.12}...)"
            raise PacketError(
                f"update: after version {update.version} the digest of the weights is {found}, the trainer's is "
                f"{update.weights_digest}. The replica began from other weights, or something else writes into them; "
                f"give it an anchor with load()"
            )
        else:
            self.verified_version = update.version

    def _check_base(self, base: BaseModel) -> None:
        """At the base version of the log, check that these are the weights of its base model."""
        if self.version != base.version or self._checked_base or self.needs_anchor is not None:
            return
        bf16 = self.storage == "bf16"
        expected = base.digest_bf16 if bf16 else base.digest
        found = None if expected is None else weights_digest(self.layout, rounded=bf16)
        if found is not None and found != expected:
            raise SyncError(
                f"catch_up: the weights at version {self.version} are not those of the base model {base.model!r} "
                f"(digest {found:.12}..., expected {expected:.12}...); {self._base_hint(base, found)}"
            )
        if self._drift is not None:
            self._drift.start(exact=base.digest is not None and self.digest() == base.digest)
        elif found is not None:
            self.verified_version = self.version
        self._checked_base = True

    def _base_hint(self, base: BaseModel, found: str) -> str:
        """What may be wrong with weights whose digest `found` is not that of the base model."""
        if base.digest_bf16 is not None and self.storage != "bf16":
            if found == base.digest_bf16:
                return "these are its bf16 values: load() the fp32 ones"
            if weights_digest(self.layout, rounded=True) == base.digest_bf16:
                if base.digest == base.digest_bf16:
                    return (
                        "rounded to bf16 they are: the run began from bf16 weights. Load the model in bf16, and do not "
                        "load() the fp32 values of its checkpoint"
                    )
                return "rounded to bf16 they are, so they differ in the low bits: load() the fp32 weights of the run's base"
        return "it is another model or revision"

    def _start_from_anchor(self, log: UpdateLog, target: int) -> int | None:
        """Load the newest anchor up to `target` if that is needed or pays; returns its version, None without one."""
        newest = log.latest_anchor(target) if isinstance(log, AnchorSource) else None
        if newest is None:
            if self.needs_anchor is not None:
                raise SyncError(f"catch_up: {self.needs_anchor}, and the log has no anchor up to version {target}")
            return None
        if self.needs_anchor is not None or newest - self.version > _ANCHOR_DISTANCE:
            assert isinstance(log, AnchorSource)
            self.load(log.read_anchor(newest), newest)
        return newest

    def _check_dtypes(self) -> None:
        expected = fit.PLANE_DTYPE[self.storage]
        held = {
            piece.tensor.dtype
            for placement in self.layout.values()
            for piece in placement.pieces
            if len(placement.shape) == 2
        }
        if held and expected not in held:
            raise SyncError(
                f"Replica: storage={self.storage!r} needs {expected} weights, the model's matrices are "
                f"{', '.join(sorted(map(str, held)))}. Load the model in {expected} or choose another storage"
            )
