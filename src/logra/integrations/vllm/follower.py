"""`Follower`: keeps a rollout engine on the version of an optimizer, whatever happens to the engine.

    the engine has the version before the pending updates     they are sent
    it is further behind, and there is a log of the run       it catches up from the log
    it has no version: asleep at level 2, other weights       it gets an anchor, the optimizer's full weights

Contract: after `sync` the engine has exactly the optimizer's weights, or an error is raised. Anchors are counted, and each
is a warning that says why: they cost what updates save.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from logra.errors import LograError, SyncError
from logra.integrations.vllm.client import Delivery, EngineClient, NoAnswerError
from logra.sync import BaseModel, Manifest
from logra.sync.layout import canonical_weights, weights_digest
from logra.sync.manifest import new_run_id
from logra.sync.protocols import PolicyOptimizer, UpdateLog
from logra.sync.publisher import optimizer_layout
from logra.update import PolicyUpdate

logger = logging.getLogger("logra")

DIGEST_EVERY = 10
"""Updates between two that carry the digest of all weights, which the engine compares."""


class Follower:
    """Sends what an optimizer applies to an engine.

    Args:
        engine: the engine.
        optimizer: whose weights it shall have.
        log: where the updates of the run are published; None for a run without a log, which begins with the optimizer's
            present weights.

    Raises:
        SyncError: the log is that of a run with another merge rule or seed than the optimizer's.
    """

    def __init__(self, engine: EngineClient, optimizer: PolicyOptimizer, log: UpdateLog | None = None) -> None:
        self.engine = engine
        self.num_anchors = 0
        """Times that the engine was given full weights."""
        self._optimizer = optimizer
        self._log = log
        manifest = None if log is None else log.manifest
        self._manifest = _begin(optimizer) if manifest is None else manifest
        config = optimizer.config
        self._manifest.check_follows(
            "Follower: the optimizer's", weight_storage=config.weight_storage, seed=config.seed
        )
        self._pending: list[PolicyUpdate] = []

    def add(self, update: PolicyUpdate | None) -> None:
        """Remember an update that the optimizer has just applied; None, a skipped step, is nothing.

        Raises:
            SyncError: it has another merge rule or seed than the run.
        """
        if update is None:
            return
        self._manifest.check_follows(
            f"Follower: the update to version {update.version}:",
            weight_storage=update.weight_storage,
            seed=update.seed,
        )
        due = update.version % DIGEST_EVERY == 0 and update.weights_digest is None
        if due and update.version == self._optimizer.version:
            update = replace(update, weights_digest=weights_digest(optimizer_layout(self._optimizer)))
        self._pending.append(update)

    def sync(self) -> Delivery:
        """Bring the engine to the optimizer's version.

        Returns:
            What it took; no bytes where nothing had changed.

        Raises:
            SyncError: the engine does not answer, or cannot hold the weights.
        """
        pending, self._pending = self._pending, []
        deliveries: list[Delivery] = []
        reason = self._attempt(lambda: self._push(pending, deliveries))
        if reason is not None and self._log is not None:
            log = self._log
            reason = self._attempt(lambda: self._push(log.read_since(self.engine.attach(self._manifest)), deliveries))
        if reason is not None:
            logger.warning("the rollout engine gets full weights: %s", reason)
            self.num_anchors += 1
            reason = self._attempt(lambda: self._load(deliveries))
        if reason is not None:
            raise SyncError(f"the rollout engine does not take over the weights: {reason}") from reason
        return Delivery(
            version=self._optimizer.version,
            num_bytes=sum(delivery.num_bytes for delivery in deliveries),
            seconds=sum(delivery.seconds for delivery in deliveries),
        )

    def _attempt(self, bring: Callable[[], None]) -> Exception | None:
        """Why the engine does not have the optimizer's version after `bring()`; None if it has."""
        try:
            bring()
        except NoAnswerError:
            raise
        except LograError as error:
            return error
        version = self.engine.version()
        if version == self._optimizer.version:
            return None
        return SyncError(f"the engine is at version {version}, the optimizer at {self._optimizer.version}")

    def _push(self, updates: Iterable[PolicyUpdate], deliveries: list[Delivery]) -> None:
        version = self.engine.attach(self._manifest)
        for update in updates:
            if update.version > version:
                self.engine.push(replace(update, run_id=self._manifest.run_id))
                deliveries.append(self._last_delivery())

    def _load(self, deliveries: list[Delivery]) -> None:
        self.engine.load(canonical_weights(optimizer_layout(self._optimizer)), self._optimizer.version)
        deliveries.append(self._last_delivery())

    def _last_delivery(self) -> Delivery:
        assert self.engine.last_delivery is not None
        return self.engine.last_delivery


def _begin(optimizer: PolicyOptimizer) -> Manifest:
    """A run that begins with the optimizer's present weights."""
    config, layout = optimizer.config, optimizer_layout(optimizer)
    base = BaseModel(
        version=optimizer.version,
        digest=weights_digest(layout),
        digest_bf16=weights_digest(layout, rounded=True),
    )
    return Manifest(run_id=new_run_id(), weight_storage=config.weight_storage, seed=config.seed, base=base)
