"""`DirectionProbe`: nothing of the training changes, and its numbers are those of explicit dense computations."""

import copy
import math

import pytest
import torch

import logra
from logra.diagnostics import DirectionProbe
from logra.diagnostics.direction import choose_layers
from logra.errors import ConfigError, ProbeError
from logra.trust.measure import predicted_kl

TRUST = logra.TrustRegion(kl_budget=1e-3, alpha_max=1e6)
PAPER = {"sketch": "one_sided", "direction": "row_adam", "restore_norm": True, "momentum": 0.0}
SCALED = {"input_scaling": True, "direction": "factored"}


def train(rl, model, probe=None, *, num_steps=3, **settings):
    """Updates as bytes, diagnostics of every step, and what a random number generator holds afterwards."""
    opt = rl.optimizer(model, **settings)
    if probe is not None:
        probe.attach(opt)
    torch.manual_seed(0)
    updates, diagnostics = [], []
    for step in range(num_steps):
        batch = rl.batch(seed=step)
        advantages = batch.pop("advantages")
        for rows in (slice(0, 2), slice(2, 4)):
            rl.loss(model, batch | {"advantages": advantages}, rows).backward()
        if settings.get("trust"):
            opt.set_probe(**batch)
        if probe is not None:
            probe.set_batch(**batch, advantages=advantages)
        opt.step()
        opt.zero_grad()
        updates.append(opt.last_update.to_bytes())
        diagnostics.append(opt.diagnostics())
    return updates, diagnostics, torch.rand(3)


@pytest.mark.parametrize("settings", [{"trust": TRUST}, {"trust": TRUST} | PAPER, SCALED], ids=["two", "one", "scaled"])
def test_the_training_is_bit_equal_with_and_without(make_lm, rl, settings):
    """Fails if the probe touches a sketch, a weight, the graph, the trust region's probe or a global random generator."""
    plain_model, probed_model = make_lm(), make_lm()
    plain = train(rl, plain_model, **settings)
    probed = train(rl, probed_model, DirectionProbe(layers=3, every=1), **settings)
    assert plain[0] == probed[0]
    assert all(torch.equal(a, b) for a, b in zip(plain_model.parameters(), probed_model.parameters(), strict=True))
    assert torch.equal(plain[2], probed[2])
    for without, with_probe in zip(plain[1], probed[1], strict=True):
        assert without == {name: value for name, value in with_probe.items() if not name.startswith("direction/")}
        assert "direction/step_gain" in with_probe


def test_metrics_are_measured_every_so_often(tiny_lm, rl):
    probe = DirectionProbe(layers=2, every=2)
    _, diagnostics, _ = train(rl, tiny_lm, probe, num_steps=4)
    measured = [any(name.startswith("direction/") for name in step) for step in diagnostics]
    assert measured == [True, False, True, False]
    assert probe.last is not None and probe.last.step == 2
    assert probe.last.metrics().items() <= diagnostics[2].items()
    # Means over layers, and the layers themselves.
    numbers = diagnostics[2]
    single = [numbers[f"direction/gradient_cosine/{layer}"] for layer in probe.layers]
    assert len(single) == 2
    assert numbers["direction/gradient_cosine"] == pytest.approx(sum(single) / 2)


@pytest.mark.parametrize("settings", [{}, PAPER, SCALED | {"momentum": 0.0}], ids=["two", "one", "scaled"])
def test_weight_space_equals_dense_matrices(make_lm, rl, settings):
    """The estimate is rebuilt from the dense float64 gradient: G A^T and B G for the very projections of the step."""
    model = make_lm()
    plain = copy.deepcopy(model).double()
    batch = rl.batch(seed=0)
    rl.loss(plain, batch).backward()
    probe = DirectionProbe(layers=("layers.1.o_proj", "layers.0.k_proj.weight"), every=1)
    opt = rl.optimizer(model, **settings)
    probe.attach(opt)
    assert probe.layers == ("layers.1.o_proj", "layers.0.k_proj")
    signs = {
        target.fqn: (opt._capture.in_signs(target.fqn), opt._capture.out_signs(target.fqn)) for target in opt.targets
    }
    rl.loss(model, batch).backward()
    opt.step()
    for name in probe.layers:
        gradient = plain.get_parameter(f"{name}.weight").grad
        in_signs, out_signs = signs[f"{name}.weight"]
        a = in_signs.matrix(4, gradient.shape[1]).double()
        if "sketch" in settings:
            estimate = gradient @ a.T @ a / 4
        else:
            b = out_signs.matrix(8, gradient.shape[0]).double().T
            q, _ = torch.linalg.qr(gradient @ a.T)
            estimate = q @ torch.linalg.pinv(b @ q) @ b @ gradient
        update = opt.last_update.weights[f"{name}.weight"].dense().double()
        found = probe.last.layers[name]

        def cosine(x, y):
            return ((x * y).sum() / (x.norm() * y.norm())).item()

        assert found.gradient_cosine == pytest.approx(cosine(gradient, estimate), abs=1e-4)
        assert found.gradient_norm_ratio == pytest.approx((estimate.norm() / gradient.norm()).item(), rel=1e-3)
        residual = ((gradient - estimate).norm() / gradient.norm()).item() ** 2
        assert found.residual_energy == pytest.approx(residual, rel=1e-3, abs=1e-6)
        assert found.update_cosine == pytest.approx(cosine(gradient, update), abs=1e-4)
        assert found.rank == torch.linalg.matrix_rank(gradient.float()).item()


def test_gains_are_inner_products_with_the_policy_gradient(make_lm, rl):
    """The loss is the policy-gradient surrogate of the probed responses, so that the gain along a change U is <G, U>, and
    G itself has a Fisher cosine of one with an estimate of full rank. Catches a wrong sign, unit or set of layers."""
    model = make_lm()
    plain = copy.deepcopy(model).double()
    batch = rl.batch()
    rl.loss(plain, batch).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    probe = DirectionProbe(layers=2, every=1, num_responses=100)
    opt = rl.optimizer(model, rank=64)
    probe.attach(opt)
    rl.loss(model, batch).backward()
    advantages = batch.pop("advantages")
    probe.set_batch(**batch, advantages=advantages)
    opt.step()
    numbers = probe.last.functions
    changes = {fqn: update.delta() for fqn, update in opt.last_update.weights.items()}

    def expected(fqns, dense=None):
        deltas = dense or {fqn: changes[fqn].out_factor @ changes[fqn].in_factor for fqn in fqns}
        gain = sum((gradients[fqn] * deltas[fqn].double()).sum().item() for fqn in fqns)
        moved = {plain.get_submodule(fqn.removesuffix(".weight")): factors(deltas[fqn].double()) for fqn in fqns}
        region = logra.TrustRegion(min_responses=100)
        return gain / math.sqrt(predicted_kl(plain, region.make_probe(**batch, temperature=1.0), moved))

    def factors(dense):
        return logra.contracts.Delta(dense, torch.eye(dense.shape[1], dtype=torch.float64))

    probed = [f"{name}.weight" for name in probe.layers]
    assert numbers["dense_gain"] == pytest.approx(expected(probed, gradients), rel=1e-4)
    assert numbers["gradient_gain"] == pytest.approx(numbers["dense_gain"], rel=1e-4)
    assert numbers["update_gain"] == pytest.approx(expected(probed), rel=1e-4)
    assert numbers["step_gain"] == pytest.approx(expected(list(changes)), rel=1e-4)
    assert numbers["gradient_fisher_cosine"] == pytest.approx(1, abs=1e-5)
    assert 0 < numbers["update_fisher_cosine"] < 0.999
    assert numbers["dense_gain"] > 0


def test_without_a_batch_the_function_space_is_left_out(tiny_lm, rl):
    probe = DirectionProbe(layers=1, every=1)
    opt = rl.optimizer(tiny_lm)
    probe.attach(opt)
    rl.loss(tiny_lm, rl.batch()).backward()
    opt.step()
    assert probe.last.functions == {} and len(probe.last.layers) == 1


def test_a_skipped_step_is_not_measured_and_its_batch_is_dropped(tiny_lm, rl):
    probe = DirectionProbe(layers=1, every=1)
    opt = rl.optimizer(tiny_lm)
    probe.attach(opt)
    batch = rl.batch()
    (rl.loss(tiny_lm, batch) * 0).backward()
    probe.set_batch(**batch)
    opt.step()
    assert opt.last_skip == "zero_gradient" and probe.last is None
    rl.loss(tiny_lm, batch).backward()
    opt.step()
    assert probe.last.step == 1 and probe.last.functions == {}


def test_zero_grad_drops_the_dense_gradient(make_lm, rl):
    """What was backpropagated before zero_grad() is not part of the step."""
    reports = []
    for extra in (False, True):
        model = make_lm()
        probe = DirectionProbe(layers=1, every=1)
        opt = rl.optimizer(model)
        probe.attach(opt)
        if extra:
            rl.loss(model, rl.batch(seed=9)).backward()
            opt.zero_grad()
        rl.loss(model, rl.batch()).backward()
        opt.step()
        reports.append(probe.last.layers)
    assert reports[0] == reports[1]


def test_detach_leaves_nothing_on_the_model(tiny_lm, rl):
    opt = rl.optimizer(tiny_lm)
    DirectionProbe(layers=2, every=1).attach(opt)
    opt.detach()
    assert all(not module._forward_hooks for module in tiny_lm.modules())


def test_layers_are_spread_over_depth_and_kinds():
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    modules = [f"layers.{depth}.{kind}" for depth in range(30) for kind in kinds]
    chosen = choose_layers(7, modules)
    assert {name.rpartition(".")[2] for name in chosen} == set(kinds)
    assert [int(name.split(".")[1]) for name in chosen] == [2, 6, 10, 15, 19, 23, 27]
    assert len(set(choose_layers(30, modules))) == 30
    assert sorted(choose_layers(210, modules)) == sorted(modules)
    assert len(choose_layers(1, modules)) == 1


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_period_below_one_is_refused(every):
    with pytest.raises(ConfigError, match=f"DirectionProbe: every={every!r}: an integer of at least 1"):
        DirectionProbe(every=every)


@pytest.mark.parametrize("layers", [0, -3, True, 1.5, "q_proj", (), ("a", "a"), ("",), None])
def test_layers_that_mean_nothing_are_refused(layers):
    with pytest.raises(ConfigError, match="DirectionProbe: layers="):
        DirectionProbe(layers=layers)


def test_layers_that_are_no_targets_are_refused(tiny_lm, rl):
    opt = rl.optimizer(tiny_lm)
    with pytest.raises(ConfigError, match=r"'layers.0.q_porj', which is not a target. Targets are 'layers.0.q_proj'"):
        DirectionProbe(layers=("layers.0.q_porj",)).attach(opt)
    with pytest.raises(ConfigError, match="layers=7, but there are 6 targets"):
        DirectionProbe(layers=7).attach(opt)
    probe = DirectionProbe(layers=1)
    probe.attach(opt)
    with pytest.raises(ConfigError, match="observes an optimizer already"):
        probe.attach(opt)


def test_a_batch_that_does_not_fit_is_refused(tiny_lm, rl):
    probe = DirectionProbe(layers=1)
    probe.attach(rl.optimizer(tiny_lm))
    batch = rl.batch()
    with pytest.raises(ProbeError, match=r"advantages has shape \(3,\): one number per response is needed, \[4\]"):
        probe.set_batch(**batch | {"advantages": batch["advantages"][:3]})
    with pytest.raises(ProbeError, match="loss_mask has no 1"):
        probe.set_batch(**batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])})
