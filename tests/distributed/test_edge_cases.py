"""Processes that have less to do, or something wrong, take part in the others' step; nobody is left waiting."""

import pytest
import torch
import torch.distributed as dist
from sharded_lm import SETTINGS, Model, batch, loss_of, own_part, probe, sharded, train
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import logra
from logra.optim.layer import Proposal

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

TRUST = {"trust": logra.TrustRegion(kl_budget=1e-4, min_responses=8, alpha_max=100.0)}


def weights_of(model):
    return {name: logra.shards.whole(value) for name, value in model.state_dict().items()}


def same_weights(results):
    return all(torch.equal(value, results[1]["weights"][name]) for name, value in results[0]["weights"].items())


def without_synchronisation(rank):
    """The first micro-batch inside a no_sync window, or not."""
    results = []
    for synchronised in (True, False):
        model = sharded(Model())
        opt = logra.SketchOptimizer(model, non_target="adamw", **SETTINGS)
        for _ in range(2):
            first, second = own_part(batch(), rank).chunk(2)
            model.set_requires_gradient_sync(synchronised)
            (loss_of(model, first) / 2).backward()
            model.set_requires_gradient_sync(True)
            (loss_of(model, second) / 2).backward()
            opt.step()
            opt.zero_grad()
        results.append(weights_of(model))
    return results


def test_no_sync_changes_nothing_for_targets(workers, tmp_path):
    """Fails if sketches are reduced in backward, where a window without synchronisation would drop a micro-batch."""
    for with_sync, without in workers.run(without_synchronisation, 2, tmp_path):
        for name, weight in with_sync.items():
            if "_proj.weight" in name:
                assert torch.allclose(weight, without[name], atol=1e-5), name
        assert not torch.equal(with_sync["layers.0.q_proj.weight"], Model().state_dict()["layers.0.q_proj.weight"])


def unequal_parts(ids, rank):
    return ids[:6] if rank == 0 else ids[6:, :5]


def token_mean(model, ids, num_tokens):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / num_tokens


def unequal_tokens(rank):
    """48 and 8 predicted tokens: the loss is the mean over all of them, as frameworks do it, times the world size."""
    model = sharded(Model())
    opt = logra.SketchOptimizer(model, **SETTINGS, **TRUST)
    ids = unequal_parts(batch(), rank)
    (2 * token_mean(model, ids, 56)).backward()
    sketches = {fqn: [t.clone() for t in sketch.tensors()] for fqn, sketch in opt._capture.sketches().items()}
    for tensors in sketches.values():
        logra.distributed.average_(tensors)
    opt.set_probe(**probe(ids))
    opt.step()
    return {"sketches": sketches, "weights": weights_of(model), "diagnostics": opt.diagnostics()}


def test_unequal_token_counts(workers, tmp_path):
    results = workers.run(unequal_tokens, 2, tmp_path)
    model = Model()
    opt = logra.SketchOptimizer(model, **SETTINGS)
    for rank in range(2):
        token_mean(model, unequal_parts(batch(), rank), 56).backward()
    for fqn, sketch in opt._capture.sketches().items():
        for reduced, whole in zip(results[0]["sketches"][fqn], sketch.tensors(), strict=True):
            assert torch.allclose(reduced, whole, rtol=0, atol=2e-6 * whole.abs().max().item()), fqn
    assert same_weights(results)
    assert results[0]["diagnostics"] == results[1]["diagnostics"]


def one_idle_process(rank, wrapped):
    """Process 1 has no valid token (or rewards that are all equal: the same zero loss) and no probe."""
    model = sharded(Model()) if wrapped else Model()
    opt = logra.SketchOptimizer(model, max_grad_norm=0.01, **SETTINGS, **TRUST)
    ids = own_part(batch(), rank)
    loss = loss_of(model, ids)
    (loss if rank == 0 else 0.0 * loss).backward()
    if rank == 0:
        # More generated tokens than one chunk holds, so that the processes would read a different number of chunks.
        opt.set_probe(**probe(ids.repeat(10, 1)))
    opt.step()
    return {"weights": weights_of(model), "diagnostics": opt.diagnostics(), "skip": opt.last_skip}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_process_without_tokens_or_probe_takes_the_same_step(wrapped, workers, tmp_path):
    """Hangs without the stand-in tokens: under FSDP2 the probe's forwards are collectives."""
    results = workers.run(one_idle_process, 2, tmp_path, wrapped=wrapped)
    assert same_weights(results)
    assert results[0]["diagnostics"] == results[1]["diagnostics"]
    assert results[0]["diagnostics"]["grad_norm"] > 0.01  # clipped, alike
    assert 0 < results[0]["diagnostics"]["realised_kl"] < 1.5e-4
    start = Model().state_dict()
    assert any(not torch.equal(start[name], weight) for name, weight in results[1]["weights"].items())


def failures(rank):
    """A NaN, an update that one process cannot round, a step without gradient: what each process sees."""
    model = sharded(Model())
    opt = logra.SketchOptimizer(model, **SETTINGS)
    ids = own_part(batch(), rank)
    start = weights_of(model)
    loss = loss_of(model, ids)
    (loss * float("nan") if rank == 1 else loss).backward()
    opt.step()
    seen = [opt.last_skip, all(torch.equal(start[name], weight) for name, weight in weights_of(model).items())]
    rounded = Proposal.rounded
    if rank == 1:
        Proposal.rounded = lambda *args, **kwargs: rounded(args[0], float("nan"), *args[2:], **kwargs)
    loss_of(model, ids).backward()
    try:
        opt.step()
    except logra.LograError as error:
        seen.append(type(error).__name__)
    Proposal.rounded = rounded
    opt.zero_grad()
    try:
        opt.step()
    except logra.LograError as error:
        seen.append(str(error)[:24])
    loss_of(model, ids).backward()
    opt.step()
    return [*seen, opt.version, opt.num_skipped]


def test_failures_of_one_process_are_everybodys(workers, tmp_path):
    results = workers.run(failures, 2, tmp_path)
    assert results[0] == results[1] == ["non_finite_gradient", True, "LograError", "no gradient was captured", 1, 1]


def an_absent_process(rank):
    """Process 1 never calls step()."""
    model = Model()
    opt = logra.SketchOptimizer(model, **SETTINGS)
    loss_of(model, own_part(batch(), rank)).backward()
    if rank == 0:
        try:
            opt.step()
        except RuntimeError as error:
            return type(error).__name__
    return None


def test_an_absent_process_is_an_error_after_the_groups_timeout(workers, tmp_path):
    assert workers.run(an_absent_process, 2, tmp_path, timeout_s=3)[0] is not None


def other_storages(rank):
    """Mixed precision, split weights and a dense inner AdamW on shards."""
    results = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    results["bf16 compute"] = train(sharded(Model(), mp_policy=policy), own_part(batch(), rank), **TRUST)
    for storage in ("split32", "split24"):
        results[storage] = train(sharded(Model().bfloat16()), own_part(batch(), rank), weight_storage=storage)
    results["adamw"] = train(sharded(Model()), own_part(batch(), rank), non_target="adamw", max_grad_norm=0.05)
    dist.barrier()
    return results


def test_mixed_precision_split_weights_and_a_dense_inner_adamw(workers, tmp_path):
    results = workers.run(other_storages, 2, tmp_path)
    for name, first in results[0].items():
        assert all(torch.equal(value, results[1][name]["weights"][fqn]) for fqn, value in first["weights"].items())
        assert first["diagnostics"] == results[1][name]["diagnostics"], name
    for name, sketch in results[0]["bf16 compute"]["sketches"].items():
        assert sketch.dtype == torch.float32, name
    assert all(0 < step["realised_kl"] < 1.6e-4 for step in results[0]["bf16 compute"]["diagnostics"])
    one = train(Model(), batch(), non_target="adamw", max_grad_norm=0.05)
    for mine, reference in zip(results[0]["adamw"]["diagnostics"], one["diagnostics"], strict=True):
        assert mine == pytest.approx(reference, rel=2e-2)
    embedding = one["weights"]["embed.weight"]
    assert not torch.equal(embedding, Model().embed.weight)
    torch.testing.assert_close(results[0]["adamw"]["weights"]["embed.weight"], embedding, rtol=0, atol=1e-5)
