"""From a real optimizer through the log to replicas: same bits, and what the publisher adds to an update."""

import copy
from dataclasses import replace

import pytest
import torch

from logra import SketchOptimizer
from logra.errors import SyncError
from logra.sync import DirectoryLog, Manifest, Publisher, Replica, module_layout
from logra.sync.layout import canonical_weights, weights_digest
from logra.sync.publisher import changeable_weights, optimizer_layout, whole_update
from logra.update import PolicyUpdate

PATTERNS = ("q_proj", "k_proj", "o_proj")


def train(model, ids, publisher_of, num_steps, log, **settings):
    opt = SketchOptimizer(model, lr=1e-2, rank=4, target_modules=PATTERNS, seed=3, **settings)
    publisher = publisher_of(log, opt)
    published = []
    for _ in range(num_steps):
        logits = model(ids).float()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        opt.step()
        published.append(publisher.publish(opt.last_update))
        opt.zero_grad()
    return opt, publisher, published


def make_publisher(log, opt):
    return Publisher(log, opt, base_model="tiny", digest_every=2, anchor_every=3)


STORAGES = [("fp32", "freeze"), ("fp32", "adamw"), ("split32", "freeze"), ("split24", "freeze")]


@pytest.mark.parametrize(("storage", "non_target"), STORAGES)
def test_replicas_of_every_storage_follow_a_real_run(make_lm, token_ids, tmp_path, storage, non_target):
    # Catches any difference between what the optimizer merged and what the log says, over its real states: momentum,
    # weight decay, low planes, AdamW on norms and embeddings.
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    model = make_lm(bias=True).to(dtype)
    base = copy.deepcopy(model)
    log = DirectoryLog(tmp_path / "updates")
    opt, publisher, published = train(
        model, token_ids, make_publisher, 5, log, weight_storage=storage, non_target=non_target, weight_decay=0.1
    )
    assert log.latest() == 5
    assert log.manifest is not None
    assert (log.manifest.weight_storage, log.manifest.seed, log.manifest.base.model) == (storage, 3, "tiny")
    expected = weights_digest(optimizer_layout(opt))
    for replica_storage in ("fp32", "split32", *(("split24",) if storage == "split24" else ())):
        dtype = torch.float32 if replica_storage == "fp32" else torch.bfloat16
        replica = Replica(copy.deepcopy(base).to(dtype), storage=replica_storage)
        if dtype != next(base.parameters()).dtype:
            replica.load(canonical_weights(module_layout(base)), 0)
        assert replica.catch_up(log) == 5
        assert replica.digest() == expected
        assert replica.verified_version == 4
    anchor = log.read_anchor(3)
    moving = {f"layers.{i}.{name}.weight" for i in range(2) for name in PATTERNS}
    assert anchor.keys() == (moving if non_target == "freeze" else dict(model.named_parameters()).keys())
    for late_storage in {"fp32", storage}:
        dtype = torch.float32 if late_storage == "fp32" else torch.bfloat16
        late = Replica(copy.deepcopy(base).to(dtype), storage=late_storage)
        late.load(anchor, 3)
        late.catch_up(log)
        assert late.digest() == expected
    assert [update.weights_digest is not None for update in published] == [False, True, False, True, False]


@pytest.mark.parametrize("storage", ["split32", "split24"])
def test_runs_of_two_planes_begin_from_bf16_whatever_the_checkpoint(make_lm, token_ids, tmp_path, storage):
    # docs/sync.md, "Storages of a replica". Catches the advice to load the fp32 values of the checkpoint, and an error
    # that leaves the user alone with it.
    checkpoint = make_lm()
    log = DirectoryLog(tmp_path / "updates")
    model = copy.deepcopy(checkpoint).to(torch.bfloat16)
    opt, *_ = train(model, token_ids, make_publisher, 2, log, weight_storage=storage)
    told = Replica(copy.deepcopy(checkpoint).to(torch.bfloat16), storage=storage)
    told.load(canonical_weights(module_layout(checkpoint)), 0)
    for replica in (told, Replica(copy.deepcopy(checkpoint))):
        with pytest.raises(SyncError, match="the run began from bf16 weights"):
            replica.catch_up(log)
    replica = Replica(copy.deepcopy(checkpoint).to(torch.bfloat16), storage=storage)
    replica.catch_up(log)
    assert replica.digest() == weights_digest(optimizer_layout(opt))


def test_metrics_and_what_is_added(make_lm, token_ids, tmp_path):
    log = DirectoryLog(tmp_path / "updates")
    opt, publisher, published = train(make_lm(), token_ids, make_publisher, 2, log)
    metrics = publisher.metrics()
    assert metrics.keys() == {"sync/bytes", "sync/seconds", "sync/version"}
    assert metrics["sync/bytes"] == len(log.read_packet(2)) == published[1].num_bytes
    assert metrics["sync/version"] == 2 and 0 < metrics["sync/seconds"] < 60
    assert publisher.num_bytes == published[0].num_bytes + published[1].num_bytes
    assert published[1].run_id == log.manifest.run_id != ""
    assert opt.last_update.run_id == ""
    assert publisher.publish(None) is None  # a skipped step
    assert (publisher.metrics(), log.latest()) == (metrics, 2)


def test_a_bare_publisher_begins_a_log(runs, tmp_path):
    # The two lines of the README: no optimizer, no manifest.
    run = runs["fp32"]
    log = DirectoryLog(tmp_path / "updates")
    publisher = Publisher(log)
    for update in run.updates:
        publisher.publish(replace(update, run_id="", weights_digest=None))
    assert log.latest() == 6
    assert log.manifest.run_id and log.manifest.base.digest is None
    again = Publisher(DirectoryLog(log.path))
    with pytest.raises(SyncError, match="belongs to run 'another'"):
        again.publish(PolicyUpdate(6, 7, 0, 6, {}, {}, "another"))


def test_publishing_can_be_repeated_after_a_full_disk(make_lm, token_ids, tmp_path, monkeypatch):
    # Catches a retry that is refused as a duplicate, and an anchor that is forgotten because the update was there.
    log = DirectoryLog(tmp_path / "updates")
    opt, publisher, _ = train(make_lm(), token_ids, make_publisher, 2, log)
    logits = opt.model(token_ids)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids.flatten()).backward()
    opt.step()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("logra.sync.anchor.save_file", full)
        with pytest.raises(SyncError, match="free some space"):
            publisher.publish(opt.last_update)
    assert (log.latest(), log.latest_anchor(3)) == (3, None)
    publisher.publish(opt.last_update)
    assert (log.latest(), log.latest_anchor(3)) == (3, 3)
    assert publisher.metrics()["sync/version"] == 3


def test_a_log_that_is_ahead_of_the_optimizer_is_refused(make_lm, token_ids, tmp_path):
    log = DirectoryLog(tmp_path / "updates")
    opt, publisher, _ = train(make_lm(), token_ids, make_publisher, 2, log)
    Publisher(DirectoryLog(log.path), opt)  # resumed where the log ends
    with pytest.raises(SyncError, match="the log is at version 2, the optimizer at 0"):
        Publisher(DirectoryLog(log.path), SketchOptimizer(make_lm(), target_modules=PATTERNS, seed=3))
    with pytest.raises(SyncError, match="before the next step"):
        publisher.publish(replace(opt.last_update, base_version=2, version=3))


def test_a_log_of_another_merge_rule_or_seed_is_refused(make_lm, tmp_path):
    # A run that is stopped before its first update, and begun again in its folder with other settings. Catches updates that
    # are published under the rule of the manifest, not under the one that they were trained by.
    def optimizer(storage, seed):
        model = make_lm().to(torch.bfloat16)
        return SketchOptimizer(model, target_modules=PATTERNS, weight_storage=storage, seed=seed)

    log = DirectoryLog(tmp_path / "updates")
    Publisher(log, optimizer("split32", 3))
    for repeats in (False, True):
        with pytest.raises(SyncError, match=r"optimizer's weight_storage is 'split24', the log's is 'split32'"):
            Publisher(DirectoryLog(log.path), optimizer("split24", 3), repeats=repeats)
        with pytest.raises(SyncError, match=r"optimizer's seed is 4, the log's is 3"):
            Publisher(DirectoryLog(log.path), optimizer("split32", 4), repeats=repeats)
    bare = Publisher(DirectoryLog(log.path))
    update = PolicyUpdate(0, 1, 3, 0, {}, {"w": torch.ones(2)}, weight_storage="split24")
    with pytest.raises(SyncError, match=r"update to version 1: weight_storage is 'split24', the log's is 'split32'"):
        bare.publish(update)
    with pytest.raises(SyncError, match=r"update to version 1: seed is 4, the log's is 3"):
        bare.publish(replace(update, weight_storage="split32", seed=4))
    assert log.latest() == 0
    bare.publish(replace(update, weight_storage="split32"))
    assert log.read(1).weight_storage == "split32"


def test_a_log_that_does_not_know_its_seed_takes_any(tmp_path):
    log = DirectoryLog(tmp_path / "updates", Manifest(run_id="a"))
    Publisher(log).publish(PolicyUpdate(0, 1, 3, 0, {}, {"w": torch.ones(2)}))
    assert log.read(1).seed == 3


def test_settings_that_cannot_work_are_refused(tmp_path):
    log = DirectoryLog(tmp_path / "updates")
    for settings in ({"digest_every": 5}, {"anchor_every": 5}, {"digest_every": -1}, {"anchor_every": -1}):
        with pytest.raises(SyncError, match="digest_every="):
            Publisher(log, **settings)

    class NoAnchors:
        manifest = None

    with pytest.raises(SyncError, match="NoAnchors holds no anchors"):
        Publisher(NoAnchors(), object(), anchor_every=5)  # pyright: ignore[reportArgumentType]


def test_anchors_hold_what_a_frozen_run_changes(make_lm):
    opt = SketchOptimizer(make_lm(), target_modules=PATTERNS, non_target="freeze")
    assert changeable_weights(opt).keys() == {target.fqn for target in opt.targets}


def test_trained_tensors_travel_as_deltas_after_their_first_value(make_lm, token_ids, tmp_path):
    # Catches a value that is sent every step, a base of another version, and a repeated publication that is refused
    # because its tensors were compared with themselves.
    log = DirectoryLog(tmp_path / "updates")
    opt, publisher, published = train(make_lm(), token_ids, make_publisher, 3, log, non_target="adamw")
    assert published[0].tensors and not published[0].deltas
    for update in published[1:]:
        assert update.deltas.keys() == published[0].tensors.keys() and not update.tensors
    tensors = published[0].tensors.values()
    saved = published[0].num_bytes - published[1].num_bytes
    assert saved > 0.2 * sum(4 * tensor.numel() for tensor in tensors)  # steps of 1e-5 leave the highest byte zero
    assert opt.last_update.tensors.keys() == published[0].tensors.keys()
    again = publisher.publish(opt.last_update)
    assert again.digest == published[-1].digest == log.read(3).digest


def test_a_weight_that_low_rank_updates_moved_is_no_base_of_a_delta(make_lm, token_ids, tmp_path):
    # Two rollbacks of one run: weights are published whole, moved by a factorised update, and published whole again.
    log = DirectoryLog(tmp_path / "updates")
    follower = Replica(make_lm())
    opt, publisher, _ = train(make_lm(), token_ids, make_publisher, 1, log)
    for is_moved in (False, True, False):
        if is_moved:
            logits = opt.model(token_ids).float()
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten()).backward()
            opt.step()
            publisher.publish(opt.last_update)
        else:
            opt.restart(version=opt.version + 1)
            publisher.publish(whole_update(opt))
    follower.catch_up(log)
    assert follower.digest() == weights_digest(optimizer_layout(opt))


def test_values_are_sent_where_a_delta_is_not_smaller_or_has_no_base(tmp_path):
    noise = torch.Generator().manual_seed(0)
    tensors = {
        "random": lambda: torch.randn(5000, generator=noise) * 2.0 ** torch.randint(-90, 90, (5000,), generator=noise),
        "integers": lambda: torch.arange(10),
        "same": lambda: torch.ones(5000),
    }
    publisher = Publisher(DirectoryLog(tmp_path / "updates"))
    for step, expected in ((0, set()), (1, {"same"}), (2, {"same"})):
        values = {name: make() for name, make in tensors.items()}
        update = publisher.publish(PolicyUpdate(step, step + 1, 0, step, {}, values))
        assert update is not None and set(update.deltas) == expected
    resumed = Publisher(DirectoryLog(tmp_path / "updates"))
    update = resumed.publish(PolicyUpdate(3, 4, 0, 3, {}, {"same": torch.ones(5000)}))
    assert update is not None and not update.deltas
