"""bf16 replicas: the bound on their drift holds, the measured drift is the formula's, and anchors set it back."""

import math
from dataclasses import replace

import pytest
import torch

from logra.sync import DirectoryLog, Drift, Replica

KINDS = ("bf16-module", "bf16-shards-2")


def relative_distance(actual, expected, names) -> float:
    squares = [(float((actual[n].double() - expected[n].double()).norm()) ** 2) for n in names]
    norms = [float(actual[n].double().norm()) ** 2 for n in names]
    return math.sqrt(sum(squares) / sum(norms))


@pytest.fixture(params=KINDS)
def bf16_kind(request) -> str:
    return request.param


def changed_names(tools, weights):
    return [name for name in weights if name in tools.targets or name == "norm.weight"]


def test_the_bound_holds_and_is_not_empty(tools, run, log, bf16_kind):
    # Catches a bound that forgets the rounding of the base, of one update, or grows without reason. fp32 distances of the
    # whole policy are at most the sum of those of the ranks.
    follower = tools.build(bf16_kind, run)
    for version in range(1, 7):
        follower.catch_up(log, until=version)
        weights = follower.weights()
        names = changed_names(tools, weights)
        exact = relative_distance(weights, run.weights[version], names)
        if len(follower.replicas) == 1:
            drift = follower.replicas[0].drift()
            assert drift.version == version
            assert 0 < exact <= drift.bound
            # Random roundings add up to less than their norms do, and the base may cost 2^-7 instead of about 2^-9.
            assert drift.bound < 20 * exact


def test_without_a_base_the_bound_is_not_known(tools, runs):
    # Catches a replica that reports a drift of 0 because nobody told it where it began.
    follower = tools.build("bf16-module", runs["split32"])
    (replica,) = follower.replicas
    assert replica.drift().bound == 0.0  # nothing has changed yet
    replica.apply(runs["split32"].updates[0])
    assert math.isnan(replica.drift().bound)


def test_the_digest_is_compared_and_reported(tools, run, log):
    (replica,) = tools.build("bf16-module", run).replicas
    replica.catch_up(log, until=5)
    drift = replica.drift()
    assert (drift.digest_matches, drift.digest_version) == (False, 4)
    assert (drift.measured, drift.measured_version) == (None, None)
    assert replica.needs_anchor is None


def test_anchors_measure_the_drift_and_set_it_back(tools, run, log, bf16_kind):
    # Catches a measurement after the weights were replaced, or against an anchor of another version.
    changed = changed_names(tools, run.weights[0])
    log.write_anchor(4, {name: run.weights[4][name] for name in changed})
    follower = tools.build(bf16_kind, run)
    follower.catch_up(log, until=3)
    before = tools.build(bf16_kind, run)
    for update in run.updates[:4]:
        before.apply(update)
    follower.catch_up(log, until=4)
    weights = follower.weights()
    for name in changed:
        exact = run.weights[4][name]
        # A tensor that travels as a lossless delta keeps all its bits: the next delta starts from them.
        expected = exact.to(torch.bfloat16).float() if name in tools.targets else exact
        assert torch.equal(weights[name], expected), name
    if len(follower.replicas) == 1:
        expected = relative_distance(before.weights(), run.weights[4], changed)
        drift = follower.replicas[0].drift()
        assert drift.measured == pytest.approx(expected, rel=1e-4)
        assert drift.measured_version == 4
        after = relative_distance(weights, run.weights[4], changed)
        # Both are set anew: the bound is the distance itself, up to the order of summation.
        assert drift.bound == pytest.approx(after, rel=1e-6)
        assert drift.bound < drift.measured
    # A jump over many updates takes an anchor of another version over: that is no measurement of drift.
    for replica in (fresh := tools.build(bf16_kind, run)).replicas:
        replica.load(run.weights[4], 4)
        assert replica.drift().measured is None
    assert fresh.version == 4


def test_a_replaced_target_drifts_from_its_next_merge_on(tools, runs):
    # Catches the low plane of a rollback, which holds the trainer's weights exactly, that stays behind when an update is
    # merged into the high plane alone.
    run = runs["fp32"]
    (replica,) = tools.build("bf16-module", run).replicas
    replica.apply(run.updates[0])
    rollback = {name: run.weights[1][name] for name in tools.targets}
    replica.apply(replace(run.updates[1], weights={}, tensors=rollback, weights_digest=None))
    assert replica.drift().bound == 0.0
    replica.apply(replace(run.updates[1], base_version=2, version=3, tensors={}, weights_digest=None))
    exact = relative_distance(replica.weights(), run.weights[2], tools.targets)
    assert 0 < exact <= replica.drift().bound < 2 * exact
    for name in tools.targets:
        weight = replica.weights()[name].float()
        assert torch.equal(weight, weight.to(torch.bfloat16).float()), name


def test_an_exact_replica_has_no_drift(tools, runs):
    run = runs["fp32"]
    (replica,) = tools.build("fp32-module", run).replicas
    replica.apply(run.updates[0])
    assert replica.drift() == Drift(version=1, bound=0.0)


def test_a_bf16_replica_refuses_another_base(tools, runs, tmp_path):
    log = DirectoryLog(tmp_path, runs["fp32"].manifest)
    other = Replica(tools.Policy(seed=5).to(torch.bfloat16), storage="bf16")
    with pytest.raises(ValueError, match="another model or revision"):
        other.catch_up(log)
