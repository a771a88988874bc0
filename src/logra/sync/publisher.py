"""`Publisher`: puts the updates of a training run into a log, and knows when they are durable."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from logra.errors import SyncError
from logra.sketch.experts import stored_name
from logra.sketch.targets import canonical_fqn
from logra.sync.compact import CompactTensors
from logra.sync.layout import Placement, canonical_weights, module_layout, weights_digest
from logra.sync.manifest import BaseModel, Manifest, new_run_id
from logra.sync.protocols import AnchorStore, PolicyOptimizer, UpdateLog
from logra.update import PolicyUpdate


class Publisher:
    """Publishes updates in order; an update is acknowledged only when the log holds it durably.

    Args:
        log: where to. A log that has not begun is begun: with the optimizer's weights as its base if there is an
            optimizer, otherwise with the first update and an unnamed base.
        optimizer: of the run, a `logra.SketchOptimizer`. Needed for digests of the weights and for anchors.
        base_model: folder or hub id that the weights were loaded from, for `logra replay`.
        revision: its revision on the hub.
        digest_every: add the digest of all weights to every update whose version is a multiple; 0 never. None is 10 with
            an optimizer and 0 without. A digest reads every weight once.
        anchor_every: store full weights at every version that is a multiple; 0 never.
        repeats: the optimizer is, or will be, that of an earlier version than the log ends at: a run that was resumed.
            Updates that the log has already are compared with it.

    Raises:
        SyncError: digests or anchors without an optimizer, a log that cannot hold anchors, or a log of another merge rule
            or seed than the optimizer's, or that ends at another version.

    Example:
        >>> publisher = logra.sync.Publisher(logra.sync.DirectoryLog("run/updates"), opt, base_model="./model")
        >>> opt.step()
        >>> publisher.publish(opt.last_update)
    """

    def __init__(
        self,
        log: UpdateLog,
        optimizer: PolicyOptimizer | None = None,
        *,
        base_model: str | None = None,
        revision: str | None = None,
        digest_every: int | None = None,
        anchor_every: int = 0,
        repeats: bool = False,
    ) -> None:
        if digest_every is None:
            digest_every = 0 if optimizer is None else 10
        if min(digest_every, anchor_every) < 0 or (optimizer is None and (digest_every or anchor_every)):
            raise SyncError(
                f"Publisher: digest_every={digest_every}, anchor_every={anchor_every}: must be at least 0, and 0 without "
                f"an optimizer, whose weights they read"
            )
        if anchor_every and not isinstance(log, AnchorStore):
            raise SyncError(f"Publisher: anchor_every={anchor_every}, but a {type(log).__name__} holds no anchors")
        self.log = log
        self._optimizer = optimizer
        self._repeats = repeats
        self._digest_every = digest_every
        self._anchor_every = anchor_every
        self._base = BaseModel(model=base_model, revision=revision)
        self._compact = CompactTensors()
        self._metrics: dict[str, float] = {}
        self.num_bytes = 0
        """Bytes of all packets published so far."""
        if optimizer is not None:
            self._begin(optimizer)

    def publish(self, update: PolicyUpdate | None) -> PolicyUpdate | None:
        """Publish the update that the optimizer has just applied.

        May be called again with the same update after an error: nothing is stored twice.

        Args:
            update: `opt.last_update`; None, a step that was skipped, does nothing.

        Returns:
            The update as it is in the log, with run id and digest, and with deltas in place of tensors that were
            published before; None for None. On return it is durable.

        Raises:
            SyncError: the update does not continue the log, belongs to another run, merge rule or seed, or could not be
                written.
        """
        if update is None:
            return None
        start = time.perf_counter()
        update = self._compact.publishable(self._stamped(update))
        num_bytes = self.log.append(update)
        if self._anchor_every and update.version % self._anchor_every == 0:
            assert isinstance(self.log, AnchorStore) and self._optimizer is not None
            self.log.write_anchor(update.version, changeable_weights(self._optimizer))
        self.num_bytes += num_bytes
        self._metrics = {
            "sync/bytes": num_bytes,
            "sync/seconds": time.perf_counter() - start,
            "sync/version": update.version,
        }
        return update

    @property
    def optimizer(self) -> PolicyOptimizer | None:
        """The optimizer that this publisher was built with."""
        return self._optimizer

    def holds(self, update: PolicyUpdate) -> bool:
        """Whether the log has this update, content and all."""
        version = update.version
        if version > self.log.latest():
            return False
        return next(iter(self.log.read_since(version - 1))).digest == self._stamped(update).digest

    def metrics(self) -> dict[str, float]:
        """Of the last update: sync/bytes, sync/seconds (digest, append and anchor) and sync/version."""
        return dict(self._metrics)

    def _begin(self, optimizer: PolicyOptimizer) -> None:
        config, manifest = optimizer.config, self.log.manifest
        if manifest is None:
            layout = optimizer_layout(optimizer)
            base = replace(
                self._base,
                version=optimizer.version,
                digest=weights_digest(layout),
                digest_bf16=weights_digest(layout, rounded=True),
            )
            self.log.start(
                Manifest(run_id=new_run_id(), weight_storage=config.weight_storage, seed=config.seed, base=base)
            )
            return
        manifest.check_follows("Publisher: the optimizer's", weight_storage=config.weight_storage, seed=config.seed)
        if self.log.latest() < optimizer.version or (self.log.latest() > optimizer.version and not self._repeats):
            raise SyncError(
                f"Publisher: the log is at version {self.log.latest()}, the optimizer at {optimizer.version}. Resume from "
                f"the weights of version {self.log.latest()}, or start a log in a new folder"
            )

    def _stamped(self, update: PolicyUpdate) -> PolicyUpdate:
        manifest = self.log.manifest
        if manifest is None:
            base = replace(self._base, version=update.base_version)
            manifest = Manifest(
                run_id=update.run_id or new_run_id(),
                weight_storage=update.weight_storage,
                seed=update.seed,
                base=base,
            )
            self.log.start(manifest)
        if update.run_id not in ("", manifest.run_id):
            raise SyncError(f"publish: the update belongs to run {update.run_id!r}, the log to {manifest.run_id!r}")
        manifest.check_follows(
            f"publish: the update to version {update.version}:", weight_storage=update.weight_storage, seed=update.seed
        )
        digest = update.weights_digest
        if self._optimizer is not None:
            if self._optimizer.version != update.version:
                raise SyncError(
                    f"publish: the update leads to version {update.version}, the optimizer's weights have "
                    f"{self._optimizer.version}; publish every update before the next step"
                )
            if self._digest_every and update.version % self._digest_every == 0:
                digest = weights_digest(optimizer_layout(self._optimizer))
        return replace(update, run_id=manifest.run_id, weights_digest=digest)


def optimizer_layout(optimizer: PolicyOptimizer) -> dict[str, Placement]:
    """The canonical weights of an optimizer's model, with the low planes that it keeps.

    Raises:
        SyncError: this process holds a part of them only.
    """
    layout = module_layout(optimizer.model)
    for name, placement in layout.items():
        if not placement.is_complete:
            raise SyncError(
                f"Publisher: {name!r} is sharded, and digests and anchors need whole weights: pass no optimizer, which "
                f"publishes updates without them"
            )
    for target in optimizer.targets:
        low: Tensor | None = optimizer.state.get(target.parameter, {}).get("lo")
        if low is not None:
            layout[target.fqn].pieces[0].lo = low.T if target.transposed else low
    return layout


def whole_update(optimizer: PolicyOptimizer) -> PolicyUpdate:
    """The update that leads to the optimizer's version from any weights: all that may change, as they are.

    For a run that returns to earlier weights, which no low-rank update can undo exactly. Its packet is as large as the
    weights.
    """
    layout = optimizer_layout(optimizer)
    tensors = {
        # In the orientation that the module stores.
        name: (value.T if layout[name].transposed else value).clone(memory_format=torch.contiguous_format)
        for name, value in changeable_weights(optimizer).items()
    }
    return PolicyUpdate(
        base_version=optimizer.version - 1,
        version=optimizer.version,
        seed=optimizer.config.seed,
        update_index=optimizer.version - 1,
        weights={},
        tensors=tensors,
        weight_storage=optimizer.config.weight_storage,
    )


def changeable_weights(optimizer: PolicyOptimizer) -> dict[str, Tensor]:
    """What an anchor holds: targets, and every other parameter that is trained."""
    changeable = {target.fqn for target in optimizer.targets} | {
        canonical_fqn(name) for name, parameter in optimizer.model.named_parameters() if parameter.requires_grad
    }
    layout = optimizer_layout(optimizer)
    return canonical_weights(
        {name: placement for name, placement in layout.items() if {name, stored_name(name)} & changeable}
    )
