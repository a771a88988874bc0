"""Dense displacements in the forward: embeddings, norms, biases and tied heads, against weights that really change."""

import copy

import pytest
import torch
from torch import nn

from logra.errors import NonFiniteProbeError, ProbeError
from logra.trust import TrustRegion
from logra.trust.measure import difference_kl, predicted_kl, realised_kl

FAMILIES = ("llama", "gpt2", "gemma2", "mlp")


def make_probe(tiny):
    return TrustRegion().make_probe(**tiny.batch(), temperature=0.7)


def displacements_of(model: nn.Module, ratio: float) -> dict[nn.Parameter, torch.Tensor]:
    """A random change of every parameter of the model."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for parameter in model.parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        found[parameter] = ratio * parameter.detach().norm() / direction.norm() * direction
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_realised_is_the_kl_of_the_changed_model(tiny, family):
    """Every parameter moves. Catches a tied head that keeps the old embedding, and a wrong sign."""
    model = tiny.model(family)
    dense = displacements_of(model, 1e-2)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, moved in zip(changed.parameters(), dense.values(), strict=True):
            parameter.sub_(moved)
    probe = make_probe(tiny)
    # The reference: both models through the same reader, without any injection.
    from logra.trust.measure import kl_since, probe_logits

    expected = kl_since(changed, probe, probe_logits(model, probe))
    assert realised_kl(model, probe, {}, dense) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_targets", [False, True])
def test_prediction_and_difference_meet_the_realised_kl_at_small_steps(tiny, family, with_targets):
    """The tangents of parameters and of factors add up in one forward. Catches one that overwrites the other."""
    model = tiny.model(family)
    targets = tiny.propose(model, ratio=1e-3) if with_targets else {}
    weights = {module.weight for module in targets}
    dense = {p: moved for p, moved in displacements_of(model, 1e-3).items() if p not in weights}
    realised = realised_kl(model, make_probe(tiny), targets, dense)
    assert predicted_kl(model, make_probe(tiny), targets, dense) == pytest.approx(realised, rel=0.02)
    assert difference_kl(model, make_probe(tiny), targets, dense) == pytest.approx(realised, rel=0.02)


def test_the_tangent_of_a_weight_as_factors_equals_that_of_its_dense_product(tiny):
    model = tiny.model("llama")
    deltas = tiny.propose(model, ratio=1e-3)
    dense = {module.weight: delta.out_factor @ delta.in_factor for module, delta in deltas.items()}
    expected = predicted_kl(model, make_probe(tiny), deltas)
    assert predicted_kl(model, make_probe(tiny), {}, dense) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_back_in_their_places_and_order(tiny, measure, fails):
    """Catches clean-up outside `finally`, and a parameter that comes back at the end of its module's list."""
    model = tiny.model("gpt2")
    before = [(name, id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()]
    if fails:
        model.transformer.ln_f.register_forward_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            measure(model, make_probe(tiny), {}, displacements_of(model, 1e-3))
    else:
        measure(model, make_probe(tiny), {}, displacements_of(model, 1e-3))
    after = list(model.named_parameters())
    assert [(name, id(parameter)) for name, parameter in after] == [(name, address) for name, address, _ in before]
    assert all(torch.equal(parameter, value) for (_, parameter), (_, _, value) in zip(after, before, strict=True))


def test_bfloat16_parameters_move_by_less_than_their_spacing(tiny):
    """A step of 2^-12 of a weight is half of nothing in bfloat16; the realised KL must still see it."""
    model = tiny.model("llama").bfloat16()
    dense = {parameter: parameter.detach().float() * 2.0**-12 for parameter in model.parameters()}
    assert realised_kl(model, make_probe(tiny), {}, dense) > 0


def test_bad_displacements_are_refused(tiny):
    model = tiny.model("llama")
    dense = displacements_of(model, 1e-3)
    first = next(iter(dense))
    with pytest.raises(ProbeError, match="every proposed weight change is zero"):
        predicted_kl(model, make_probe(tiny), {}, {first: torch.zeros_like(first)})
    dense[first][0, 0] = float("nan")
    with pytest.raises(NonFiniteProbeError, match="not finite"):
        predicted_kl(model, make_probe(tiny), {}, dense)
