"""What every kind of replica owes: the trainer's bits, all or nothing, and a clear refusal of everything else."""

from dataclasses import replace

import pytest
import torch

from logra.errors import LograError, PacketError, SyncError
from logra.storage import on_grid24
from logra.sync import DirectoryLog, Piece, Placement, Replica, combine_parts, fit
from logra.tensor_delta import TensorDelta
from logra.update import LowRankUpdate


def state(follower):
    return follower.version, {name: value.clone() for name, value in follower.weights().items()}


def assert_unchanged(tools, follower, before):
    version, weights = before
    assert follower.version == version
    tools.assert_same_bits(follower.weights(), weights)


def test_the_bits_are_the_trainers_after_every_update(tools, run, exact_kind):
    # Catches a second rounding, a wrong slice, a lost low plane, decay applied after the subtraction, and a merge rule
    # that follows the storage of the replica instead of that of the run. Expected values: numpy, from the formula.
    follower = tools.build(exact_kind, run)
    for update in run.updates:
        follower.apply(update)
        tools.assert_same_bits(follower.weights(), run.weights[update.version])


def test_the_merge_rules_differ_in_this_data(tools, runs):
    # The test above proves nothing about merge rules if no tie is ever met.
    run = runs["fp32"]
    ties = [(value.view(torch.int32) & 0xFFFF) == 0x8000 for value in run.weights[0].values()]
    assert sum(int(tie.sum()) for tie in ties) > 100


def test_packets_carry_all_that_a_replica_needs(tools, run, exact_kind):
    # Catches a field that the wire loses.
    follower = tools.build(exact_kind, run)
    for update in run.updates:
        follower.apply(type(update).from_bytes(update.to_bytes()))
    tools.assert_same_bits(follower.weights(), run.weights[-1])


def test_catching_up_equals_applying_one_by_one(tools, run, log, exact_kind):
    follower = tools.build(exact_kind, run)
    assert follower.catch_up(log, until=2) == 2
    tools.assert_same_bits(follower.weights(), run.weights[2])
    assert follower.catch_up(log) == len(run.updates) - 2
    assert follower.catch_up(log) == 0
    tools.assert_same_bits(follower.weights(), run.weights[-1])


def test_the_thread_count_does_not_matter(tools, run, exact_kind):
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        follower = tools.build(exact_kind, run)
        for update in run.updates:
            follower.apply(update)
    finally:
        torch.set_num_threads(num_threads)
    tools.assert_same_bits(follower.weights(), run.weights[-1])


def bad_updates(run):
    """Updates that do not fit a replica at version 1, by what is wrong with them."""
    good = run.updates[1]
    name = "layer.q_proj.weight"
    other_model = {**good.weights, "layer.x_proj.weight": good.weights[name]}
    weight = good.weights[name]
    ones = torch.ones(11, 1, dtype=torch.int8)
    taller = LowRankUpdate(
        (11, 12), 1, 8, ones, ones[:1].expand(1, 12), torch.zeros(11).short(), torch.zeros(12).short()
    )
    huge = replace(
        weight,
        exponent_out=torch.full_like(weight.exponent_out, 50),
        exponent_in=torch.full_like(weight.exponent_in, 50),
        rank=1024,
        factor_bits=8,
        factor_out=torch.full((weight.shape[0], 1024), 127, dtype=torch.int8),
        factor_in=torch.full((1024, weight.shape[1]), 127, dtype=torch.int8),
        signs=None,
    )
    return {
        "duplicate": run.updates[0],
        "gap": run.updates[2],
        "run_id": replace(good, run_id="another-run"),
        "seed": replace(good, seed=good.seed + 1),
        "weight_storage": replace(good, weight_storage="fp32" if run.storage == "split32" else "split32"),
        "unknown weight": replace(good, weights=other_model),
        "weight of another shape": replace(good, weights={**good.weights, name: taller}),
        "unknown tensor": replace(good, tensors={"norm.bias": torch.zeros(12)}),
        "tensor of another shape": replace(good, tensors={"norm.weight": torch.zeros(13)}),
        "tensor of another kind": replace(good, tensors={"norm.weight": torch.zeros(12, dtype=torch.int32)}),
        "tensor with more bits": replace(good, tensors={"norm.weight": torch.zeros(12, dtype=torch.float64)}),
        "unknown delta": replace(good, deltas={"norm.bias": TensorDelta(torch.float32, torch.zeros(12).int())}),
        "delta of another shape": replace(
            good, tensors={}, deltas={"norm.weight": TensorDelta(torch.float32, torch.zeros(13).int())}
        ),
        "overflow": replace(good, weights={**good.weights, name: huge}),
    }


BAD = (
    "duplicate", "gap", "run_id", "seed", "weight_storage", "unknown weight", "weight of another shape",
    "unknown tensor", "tensor of another shape", "tensor of another kind", "tensor with more bits",
    "unknown delta", "delta of another shape", "overflow",
)  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_what_does_not_fit_is_refused_whole(tools, run, kind, fault):
    # Catches a check that comes after the first write: the faulty entry is the last or the only bad one of many.
    follower = tools.build(kind, run)
    follower.apply(run.updates[0])
    before = state(follower)
    update = bad_updates(run)[fault]
    if fault == "overflow":
        # 2^50 * 2^50 * 127 * 127 * 1024 stays below 2^127; weights that are near it already make the sum too large.
        for replica in follower.replicas:
            replica._magnitudes["layer.q_proj.weight"] = 2.0**126.99
            replica.layout["layer.q_proj.weight"].pieces[0].tensor[:1, :1] = 2.0**126.99
        before = state(follower)
    for replica in follower.replicas:
        with pytest.raises(PacketError):
            replica.apply(update)
    assert_unchanged(tools, follower, before)
    if fault != "overflow":
        for good in run.updates[1:]:
            follower.apply(good)
        assert follower.version == len(run.updates)


def test_interrupted_writing_is_noticed(tools, run, kind, log, monkeypatch):
    # Catches a replica that goes on with half an update: an error in the middle of merging (out of memory, Ctrl-C).
    follower = tools.build(kind, run)
    replica = follower.replicas[-1]
    merge = type(replica)._merge
    calls = []

    def fails_at_the_third(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        merge(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(type(replica), "_merge", fails_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            replica.apply(run.updates[0])
    assert replica.version == 0
    with pytest.raises(SyncError, match="version 1 was interrupted"):
        replica.apply(run.updates[0])
    with pytest.raises(SyncError, match="no anchor"):
        replica.catch_up(log)
    log.write_anchor(2, changeable(run, 2))
    replica.catch_up(log)
    assert (replica.version, replica.needs_anchor) == (6, None)


def changeable(run, version):
    return {name: value for name, value in run.weights[version].items() if name != "embed.weight"}


def test_lost_weights_are_a_gap_until_an_anchor(tools, run, exact_kind, log):
    follower = tools.build(exact_kind, run)
    follower.catch_up(log, until=3)
    for replica in follower.replicas:
        for name, placement in replica.layout.items():
            if name != "embed.weight":
                for piece in placement.pieces:
                    piece.tensor.zero_()
        replica.invalidate("the engine slept and dropped its weights")
        with pytest.raises(SyncError, match="dropped its weights"):
            replica.apply(run.updates[3])
    log.write_anchor(2, changeable(run, 2))
    follower.catch_up(log)
    tools.assert_same_bits(follower.weights(), run.weights[-1])


def test_a_far_anchor_bounds_catching_up(tools, run, exact_kind, log, monkeypatch):
    monkeypatch.setattr("logra.sync.replica._ANCHOR_DISTANCE", 3)
    log.write_anchor(4, changeable(run, 4))
    follower = tools.build(exact_kind, run)
    assert follower.catch_up(log) == 2
    tools.assert_same_bits(follower.weights(), run.weights[-1])
    near = tools.build(exact_kind, run, version=1)
    assert near.catch_up(log) == 5


def test_a_wrong_base_is_refused_before_anything_is_applied(tools, run, kind, log):
    # Catches a replica of another revision that follows in silence. bf16 replicas have a digest of their own.
    other = tools.build(kind, run)
    with torch.no_grad():
        for replica in other.replicas:
            for piece in replica.layout["embed.weight"].pieces:
                piece.tensor[:1, :1] *= 1.5
    before = state(other)
    if len(other.replicas) > 1:
        parts = [part for replica in other.replicas for part in replica.digest_parts()]
        assert combine_parts(parts) != run.manifest.base.digest
        return
    with pytest.raises(SyncError, match="not those of the base model 'policy'"):
        other.catch_up(log)
    assert_unchanged(tools, other, before)


def test_a_digest_finds_weights_that_are_not_the_trainers(tools, run, log, exact_kind):
    # Catches a digest that is not compared, or compared before the merge.
    follower = tools.build(exact_kind, run)
    if len(follower.replicas) > 1:
        pytest.skip("one rank alone cannot tell; see test_ranks_together_check_the_digest")
    follower.catch_up(log, until=2)
    (replica,) = follower.replicas
    assert replica.verified_version == 2
    replica.layout["layer.o_proj.weight"].pieces[0].tensor[3, 4] += 1.0
    replica.apply(run.updates[2])
    with pytest.raises(PacketError, match="digest"):
        replica.apply(run.updates[3])
    with pytest.raises(SyncError, match="not the trainer's"):
        replica.apply(run.updates[4])
    log.write_anchor(4, changeable(run, 4))
    replica.catch_up(log)
    tools.assert_same_bits(follower.weights(), run.weights[-1])
    assert replica.verified_version == 6


def test_ranks_together_check_the_digest(tools, run, exact_kind):
    follower = tools.build(exact_kind, run)
    for update in run.updates:
        follower.apply(update)
        parts = [part for replica in follower.replicas for part in replica.digest_parts()]
        if update.weights_digest is not None:
            assert combine_parts(parts) == update.weights_digest
    # The norm is on every rank and counts once; a rank that disagrees about it is found.
    if len(follower.replicas) > 1:
        follower.replicas[-1].layout["norm.weight"].pieces[0].tensor[0] += 1
        parts = [part for replica in follower.replicas for part in replica.digest_parts()]
        with pytest.raises(SyncError, match=r"ranks disagree about 'norm\.weight'"):
            combine_parts(parts)
        with pytest.raises(SyncError, match="the parts cover"):
            combine_parts(part for part in follower.replicas[0].digest_parts() if part.name in tools.targets)


def test_the_log_must_be_that_of_the_run(tools, run, log, kind, tmp_path):
    follower = tools.build(kind, run)
    follower.catch_up(log, until=1)
    other = DirectoryLog(tmp_path / "other", replace(run.manifest, run_id="other-run"))
    replica = follower.replicas[0]
    with pytest.raises(SyncError, match="'other-run'"):
        replica.catch_up(other)
    with pytest.raises(SyncError, match="asked for 9"):
        replica.catch_up(log, until=9)
    with pytest.raises(SyncError, match="asked for 0"):
        replica.catch_up(log, until=0)
    with pytest.raises(SyncError, match="has not begun"):
        replica.catch_up(DirectoryLog(tmp_path / "missing"))
    shorter = DirectoryLog(tmp_path / "shorter", run.manifest)
    with pytest.raises(SyncError, match="the replica is at version 1, the log at 0"):
        replica.catch_up(shorter)
    assert replica.version == 1


def test_loading_checks_everything_first(tools, run, kind):
    follower = tools.build(kind, run)
    before = state(follower)
    good = run.weights[3]
    for bad in (
        {**good, "other": torch.zeros(3)},
        {**good, "norm.weight": torch.zeros(13)},
        {**good, "norm.weight": torch.zeros(12, dtype=torch.float64)},
    ):
        for replica in follower.replicas:
            with pytest.raises(PacketError):
                replica.load(bad, 3)
    assert_unchanged(tools, follower, before)


def test_a_rank_may_hold_nothing_of_a_weight(tools, runs):
    run = runs["fp32"]
    layout = tools.rank_layout(run.weights[0], 0, 1, torch.float32)
    layout["layer.down_proj.weight"] = replace(layout["layer.down_proj.weight"], pieces=())
    replica = Replica(layout)
    for update in run.updates:
        replica.apply(update)
    assert replica.digest() is None
    piece = replica.layout["layer.up_proj.weight"].pieces[0]
    assert torch.equal(piece.tensor, run.weights[-1]["layer.up_proj.weight"])
    with pytest.raises(LograError, match="does not live here"):
        replica.weights()


def test_planes_of_8_bits_follow_runs_of_24_bits_alone(tools, runs, tmp_path):
    # Catches a replica that rounds away what the trainer has, and one that is refused halfway.
    for storage in ("fp32", "split32"):
        run = runs[storage]
        log = DirectoryLog(tmp_path / storage, run.manifest)
        follower = tools.build("split24-module", run)
        before = state(follower)
        with pytest.raises(PacketError, match=f"weight_storage is '{storage}'; a replica with storage='split24'"):
            follower.apply(run.updates[0])
        with pytest.raises(
            SyncError, match=f"catch_up: the log's weight_storage is '{storage}'.*Use storage='split32'"
        ):
            follower.catch_up(log)  # no packet was read
        assert_unchanged(tools, follower, before)


def test_planes_of_8_bits_are_what_targets_have(tools, runs):
    # Catches low planes of 16 bits that stay behind an anchor, and tensors of 32 bits that planes of 8 would round.
    run = runs["split24"]
    (replica,) = tools.build("split24-module", run).replicas
    low = {name: placement.pieces[0].lo.dtype for name, placement in replica.layout.items()}
    assert set(low.values()) == {torch.int16}
    replica.apply(run.updates[0])
    low = {name: placement.pieces[0].lo.dtype for name, placement in replica.layout.items()}
    assert {name for name, dtype in low.items() if dtype == torch.int8} == set(tools.targets)
    replica.load(run.weights[3], 3)
    low = {name: placement.pieces[0].lo.dtype for name, placement in replica.layout.items()}
    assert {name for name, dtype in low.items() if dtype == torch.int8} == set(tools.targets)
    tools.assert_same_bits(replica.weights(), run.weights[3])
    before = {name: value.clone() for name, value in replica.weights().items()}
    name = tools.targets[0]
    finer = run.weights[3][name] + 2.0**-20
    delta = TensorDelta.between(run.weights[3][name], finer)
    for changed in ({"tensors": {name: finer}}, {"deltas": {name: delta}}):
        bad = replace(run.updates[3], **({"weights": {}, "tensors": {}, "deltas": {}} | changed))
        with pytest.raises(PacketError, match="more than the 24 bits"):
            replica.apply(bad)
    with pytest.raises(PacketError, match="more than the 24 bits"):
        replica.load({name: finer}, 3)
    tools.assert_same_bits(replica.weights(), before)
    replica.apply(run.updates[3])
    tools.assert_same_bits(replica.weights(), run.weights[4])


def test_settings_that_cannot_work_are_refused(tools, runs):
    for storage in ("split32", "split24", "bf16"):
        with pytest.raises(SyncError, match=r"needs torch.bfloat16 weights, the model's matrices are torch.float32"):
            Replica(tools.Policy(), storage=storage)
    with pytest.raises(SyncError, match=r"needs torch.float32"):
        Replica(tools.Policy().to(torch.bfloat16))
    with pytest.raises(SyncError, match="storage is 'int8'"):
        Replica(tools.Policy(), storage="int8")
    with pytest.raises(SyncError, match="version is -1"):
        Replica(tools.Policy(), version=-1)


def test_a_split32_replica_without_the_low_plane_of_an_fp32_base_is_told_so(tools, runs, tmp_path):
    # Catches a replica that silently begins from rounded weights.
    run = runs["fp32"]
    log = DirectoryLog(tmp_path, run.manifest)
    model = tools.Policy(run.seed).to(torch.bfloat16)
    replica = Replica(model, storage="split32")
    for name, value in run.weights[0].items():
        replica.layout[name].pieces[0].write(value.view(replica.layout[name].matrix_shape), keep_low=False)
    with pytest.raises(SyncError, match="bf16 values: load"):
        replica.catch_up(log)
    replica.load(run.weights[0], 0)
    replica.catch_up(log)


def test_low_bits_of_another_base_are_named(tools, runs, tmp_path):
    # An fp32 run, and weights that round to the same bf16 numbers: neither its values nor its bf16 values.
    run = runs["fp32"]
    log = DirectoryLog(tmp_path, run.manifest)
    (replica,) = tools.build("fp32-module", run).replicas
    piece = replica.layout["layer.q_proj.weight"].pieces[0]
    piece.tensor.view(torch.int32)[1, 0] ^= 1  # row 1 of the base holds no ties
    with pytest.raises(SyncError, match="they differ in the low bits"):
        replica.catch_up(log)


def test_values_of_24_bits_are_checked_in_blocks_of_rows(monkeypatch):
    # Catches a check of the first block alone, and one that needs several times the memory of the weight at once.
    sizes = []
    monkeypatch.setattr(fit, "on_grid24", lambda value: (sizes.append(value.numel()), on_grid24(value))[1])
    base = torch.randn(64, 8).bfloat16()
    piece = Piece(base.clone(), (0, 64), (0, 8), torch.zeros(64, 8, dtype=torch.int8))
    placement = Placement((64, 8), (piece,))
    value = base.float()
    fit.check_tensor("w", value, placement, "split24")
    assert sum(sizes) == value.numel() and max(sizes) <= value.numel() // 4
    for row in (0, 63):
        finer = value.clone()
        finer.view(torch.int32)[row, 7] += 1
        with pytest.raises(PacketError, match="more than the 24 bits"):
            fit.check_tensor("w", finer, placement, "split24")


def test_a_delta_that_would_not_stay_finite_is_refused_whole(tools, runs):
    # Catches a bf16 piece that becomes infinite halfway through an update: values near the largest fp32 number.
    run = runs["fp32"]
    follower = tools.build("split32-module", run, 1)
    before = state(follower)
    old = run.weights[1]["norm.weight"]
    delta = TensorDelta.between(old, torch.full_like(old, 3.39e38))
    with pytest.raises(PacketError, match="not finite in bf16"):
        follower.apply(replace(run.updates[1], tensors={}, deltas={"norm.weight": delta}))
    assert_unchanged(tools, follower, before)


def test_a_bf16_replica_keeps_trained_tensors_exactly_once_it_has_their_value(tools, runs):
    # Catches steps of a fraction of a bf16 unit that are rounded away every time, and a bound that forgets the base.
    run = runs["fp32"]
    follower = tools.build("bf16-module", run)
    for update in run.updates:
        follower.apply(update)
    assert torch.equal(follower.weights()["norm.weight"], run.weights[-1]["norm.weight"])
    late = tools.build("bf16-module", run, 3)  # from bf16 values, after the only full value
    for update in run.updates[3:]:
        late.apply(update)
    found, expected = late.weights()["norm.weight"], run.weights[-1]["norm.weight"]
    assert not torch.equal(found, expected)
    assert ((found - expected).abs() <= 2.0**-8 * expected.abs()).all()
