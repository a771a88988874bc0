"""Back to an earlier version of the weights, by way of the update log.

Updates cannot be subtracted back: every merge rounds. The log can be replayed, exactly: from the newest anchor at or before
the version, update by update, into the weights of the model itself. Versions only go up: the restored weights become a *new*
version, published as an ordinary update that carries full tensors instead of factors. A replica that follows the log
applies it like any other, and is at the trainer's weights again, bit for bit.

Moments are not in the log, and those of a run that went astray are not wanted: the optimizer begins without them.
"""

import torch

from logra.errors import ConfigError, LograError
from logra.optim import SketchOptimizer
from logra.sync import Publisher, Replica
from logra.sync.fit import Storage
from logra.sync.layout import Layout
from logra.sync.protocols import AnchorStore, UpdateLog
from logra.sync.publisher import changeable_weights, optimizer_layout, whole_update
from logra.update import PolicyUpdate


def anchor_start(publisher: Publisher, optimizer: SketchOptimizer) -> None:
    """Store the weights that the run begins with, so that every version can be rebuilt from the log alone.

    Raises:
        ConfigError: the log cannot hold anchors.
    """
    log = publisher.log
    if not isinstance(log, AnchorStore):
        raise ConfigError(f"guards: rollback needs a log that holds anchors; a {type(log).__name__} does not")
    if log.latest_anchor(optimizer.version) is None:
        log.write_anchor(optimizer.version, changeable_weights(optimizer))


@torch.no_grad()
def restore(log: UpdateLog, layout: Layout, version: int, *, weight_storage: Storage) -> None:
    """Write the weights of `version` into the tensors of a layout, exactly.

    Args:
        log: of the run, with an anchor at or before `version`.
        layout: where the weights live; with "split32" and "split24" its pieces have their low planes.
        version: to restore.
        weight_storage: "fp32", "split32" or "split24", of the run.

    Raises:
        SyncError: the log does not reach back to an anchor, or is damaged.
    """
    anchor = log.latest_anchor(version) if isinstance(log, AnchorStore) else None
    if anchor is None or log.manifest is None or not isinstance(log, AnchorStore):
        raise LograError(f"the update log has no anchor at or before version {version} to rebuild its weights from")
    replica = Replica(layout, anchor, weight_storage, run_id=log.manifest.run_id)
    replica.load(log.read_anchor(anchor), anchor)
    replica.catch_up(log, until=version)


def go_back(optimizer: SketchOptimizer, publisher: Publisher, version: int) -> PolicyUpdate:
    """Give the model the weights of an earlier version, and publish them as the next one.

    Args:
        optimizer: of the run; its moments are dropped, and its version goes up by one.
        publisher: of the run, at the optimizer's version.
        version: whose weights to restore.

    Returns:
        The update that was published.
    """
    restore(publisher.log, optimizer_layout(optimizer), version, weight_storage=optimizer.config.weight_storage)
    optimizer.restart(version=optimizer.version + 1)
    published = publisher.publish(whole_update(optimizer))
    assert published is not None
    return published
