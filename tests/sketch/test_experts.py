"""Experts of a mixture as targets: sketched one by one, left alone without a token, shipped and priced like other weights."""

import copy
import pickle

import pytest
import torch
from tiny_moe import NUM_EXPERTS, make_model
from torch.nn import functional as F

import logra
from logra.errors import CaptureError, LograError, TargetError
from logra.sketch import reference
from logra.sketch.targets import find_targets

TARGETS = ("q_proj", "gate_up_proj", "down_proj")


def tokens(num_rows=4, width=12, seed=1):
    return torch.randint(0, 64, (num_rows, width), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids):
    return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def weights_of(model):
    """Canonical name -> copy, experts by slice."""
    weights = {}
    for name, value in model.named_parameters():
        slices = {f"{name}[{index}]": part for index, part in enumerate(value)} if value.ndim == 3 else {name: value}
        weights |= {name: part.detach().clone() for name, part in slices.items()}
    return weights


def probe(ids):
    generated = torch.ones_like(ids)
    generated[:, 0] = 0
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": generated}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_sketches_are_those_of_the_dense_gradient_of_every_expert(implementation):
    plain = make_model()
    plain.set_experts_implementation(implementation)
    loss_of(plain, tokens()).backward()
    model = make_model()
    opt = logra.SketchOptimizer(model, lr=1e-3, rank=4, target_modules=TARGETS)
    loss = loss_of(model, tokens())
    torch.testing.assert_close(loss, loss_of(plain, tokens()))
    loss.backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is None
    capture = opt._capture
    experts = [target for target in opt.targets if "experts" in target.fqn]
    assert len(experts) == 2 * 2 * NUM_EXPERTS
    for target in experts:
        fqn, _, index = target.fqn.removesuffix("]").partition("[")
        gradient = plain.get_parameter(fqn).grad[int(index)]
        sketch = capture.sketches()[target.fqn]
        if not gradient.any():
            assert sketch.tensors() == []
            continue
        on_in = reference.sketch_in(gradient, capture.in_signs(target.fqn).matrix(4, target.in_features))
        on_out = reference.sketch_out(gradient, capture.out_signs(target.fqn).matrix(8, target.out_features))
        tolerance = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(sketch.on_in.double(), on_in, rtol=1e-5, atol=16 * tolerance)
        torch.testing.assert_close(sketch.on_out.double(), on_out, rtol=1e-5, atol=24 * tolerance)


def test_experts_without_a_token_are_left_alone():
    """Fails if weight decay, or an update of zeros, touches an expert that the batch never reached."""
    model = make_model()
    opt = logra.SketchOptimizer(model, lr=1e-2, rank=4, weight_decay=0.1, target_modules=TARGETS)
    chosen = [set(), set()]
    for layer, seen in zip(model.model.layers, chosen, strict=True):
        layer.mlp.gate.register_forward_hook(lambda _, __, output, seen=seen: seen.update(output[2].flatten().tolist()))
    start = weights_of(model)
    loss_of(model, tokens(1, 2)).backward()
    opt.step()
    expected = {
        f"model.layers.{layer}.mlp.experts.{name}[{index}]"
        for layer, seen in enumerate(chosen)
        for index in seen
        for name in ("gate_up_proj", "down_proj")
    }
    assert 0 < len(expected) < 32
    assert {name for name in opt.last_update.weights if "experts" in name} == expected
    for name, weight in weights_of(model).items():
        moved = name in expected or "q_proj" in name
        assert torch.equal(weight, start[name]) != moved, name
        if moved:
            update = opt.last_update.weights[name]
            merged = torch.empty_like(weight).copy_(start[name])
            logra.storage.apply_update_(update, merged)
            assert torch.equal(merged, weight), name


@pytest.mark.parametrize(
    ("storage", "dtype"), [("fp32", torch.float32), ("split32", torch.bfloat16), ("split24", torch.bfloat16)]
)
def test_replicas_follow_to_the_bit(storage, dtype, tmp_path):
    model = make_model().to(dtype)
    opt = logra.SketchOptimizer(model, lr=1e-2, rank=4, target_modules=TARGETS, weight_storage=storage)
    log = logra.sync.DirectoryLog(tmp_path)
    publisher = logra.sync.Publisher(log, opt, digest_every=1, anchor_every=2)
    for step in range(3):
        loss_of(model, tokens(1, 4, seed=step)).backward()
        opt.step()
        opt.zero_grad()
        publisher.publish(opt.last_update)
    exact = logra.sync.Replica(make_model().to(dtype), storage=storage)
    rounded = logra.sync.Replica(make_model().to(torch.bfloat16), storage="bf16")
    for replica in (exact, rounded):
        replica.catch_up(log)
    assert exact.verified_version == 3
    assert exact.digest() == logra.sync.layout.weights_digest(logra.sync.publisher.optimizer_layout(opt))
    assert 0 < rounded.drift().bound < 0.01
    from_anchor = logra.sync.Replica(make_model(seed=5).to(dtype), storage=storage)
    from_anchor.load(weights_of(make_model().to(dtype)), 0)
    from_anchor.load(log.read_anchor(2), 2)
    from_anchor.catch_up(log)
    assert from_anchor.verified_version == 3


def test_experts_that_are_trained_densely_travel_under_the_same_names(tmp_path):
    model, other = make_model(), make_model()
    opt = logra.SketchOptimizer(model, lr=1e-2, rank=4, target_modules="q_proj", non_target="adamw", non_target_lr=1e-3)
    publisher = logra.sync.Publisher(logra.sync.DirectoryLog(tmp_path), opt, digest_every=1)
    replica = logra.sync.Replica(other)
    for step in range(2):  # the second travels as deltas
        loss_of(model, tokens(seed=step)).backward()
        opt.step()
        opt.zero_grad()
        replica.apply(publisher.publish(opt.last_update))
    experts = model.model.layers[0].mlp.experts
    assert torch.equal(experts.down_proj, other.model.layers[0].mlp.experts.down_proj)
    assert not torch.equal(experts.down_proj, make_model().model.layers[0].mlp.experts.down_proj)


def test_the_trust_region_prices_what_experts_do():
    """Fails if the forward tangent does not pass through the experts, or their displacement is left out of the KL."""
    predicted = {}
    for method in ("tangent", "difference"):
        model = make_model()
        # Short steps, which send no token to another expert: the logits jump where that happens.
        trust = logra.TrustRegion(kl_budget=1e-7, method=method, min_responses=4, alpha_max=100.0)
        opt = logra.SketchOptimizer(
            model, lr=1e-4, rank=4, target_modules=("gate_up_proj", "down_proj"), trust=trust, weight_decay=0.01
        )
        loss_of(model, tokens()).backward()
        opt.set_probe(**probe(tokens()))
        opt.step()
        diagnostics = opt.diagnostics()
        predicted[method] = diagnostics["predicted_kl"]
        assert diagnostics["realised_kl"] == pytest.approx(1e-7, rel=0.3)
    assert predicted["tangent"] == pytest.approx(predicted["difference"], rel=0.1)


def test_a_probe_that_reaches_few_experts_warns_of_nothing():
    model = make_model()
    opt = logra.SketchOptimizer(
        model, lr=1e-4, rank=4, target_modules=TARGETS, trust=logra.TrustRegion(kl_budget=1e-5, min_tokens=1)
    )
    loss_of(model, tokens()).backward()
    opt.set_probe(**probe(tokens(2, 2, seed=3)))
    opt.step()
    assert opt.last_skip is None


def test_state_is_kept_by_expert():
    updates = []
    for interrupted in (False, True):
        model = make_model()
        opt = logra.SketchOptimizer(model, lr=1e-2, rank=4, target_modules=TARGETS)
        for step in range(3):
            loss_of(model, tokens(1, 4, seed=step)).backward()
            opt.step()
            opt.zero_grad()
            if interrupted:
                state, weights = copy.deepcopy(opt.state_dict()), model.state_dict()
                model = make_model(seed=9)
                model.load_state_dict(weights)
                opt = logra.SketchOptimizer(model, lr=1e-2, rank=4, target_modules=TARGETS)
                opt.load_state_dict(state)
        updates.append(weights_of(model))
    assert all(torch.equal(weight, updates[1][name]) for name, weight in updates[0].items())


def test_detach_and_copies_have_the_plain_forward():
    model = make_model()
    expected = model(tokens()).logits
    opt = logra.SketchOptimizer(model, lr=1e-2, rank=4, target_modules="down_proj")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, tokens()).backward()
        assert other.model.layers[0].mlp.experts.down_proj.grad is not None
        torch.testing.assert_close(other(tokens()).logits, expected)
    with pytest.raises(CaptureError, match="already belongs to another"):
        logra.SketchOptimizer(model, lr=1e-2, target_modules="down_proj")
    opt.detach()
    experts = model.model.layers[0].mlp.experts
    assert "forward" not in experts.__dict__
    assert "_logra_experts" not in experts.__dict__
    logra.SketchOptimizer(model, lr=1e-2, target_modules="down_proj")
    logra.detach(model)
    assert "forward" not in experts.__dict__


def test_weights_that_were_replaced_are_an_error():
    model = make_model()
    logra.SketchOptimizer(model, lr=1e-2, target_modules="down_proj")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj.data = experts.down_proj.data.clone()
    with pytest.raises(CaptureError, match="not the parameter that the optimizer was built on"):
        model(tokens())


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("is_transposed", "cannot be sketched"),
        ("has_bias", "experts with biases"),
        ("_is_expert_parallel", "experts with biases, norms of their own, or spread"),
    ],
)
def test_other_experts_are_refused_by_name(flag, message):
    model = make_model()
    setattr(model.model.layers[0].mlp.experts, flag, True)
    with pytest.raises(TargetError, match=rf"'model.layers.0.mlp.experts.down_proj'.*{message}"):
        find_targets(model, "down_proj")


def test_frozen_and_replaced_experts():
    model = make_model()
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    targets = find_targets(model, "down_proj")
    assert [target.fqn for target in targets] == [f"model.layers.1.mlp.experts.down_proj[{i}]" for i in range(8)]
    model.model.layers[1].mlp.experts.forward = lambda *args: args[0]
    with pytest.raises(TargetError, match="was replaced"):
        find_targets(model, "down_proj")


def test_a_replica_of_sharded_experts_is_refused_by_name(monkeypatch):
    """Played: `fully_shard` needs processes (tests/distributed/test_experts.py says what it does to a trainer)."""
    model = make_model()
    monkeypatch.setattr(logra.sync.layout, "is_sharded", lambda parameter: parameter.ndim == 3)
    with pytest.raises(
        LograError, match=r"'model.layers.0.mlp.experts.gate_up_proj'.*sharded.*whole model in one process"
    ):
        logra.sync.Replica(model)
