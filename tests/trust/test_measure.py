"""Predicted and realised KL against dense float64 references: weights that really change, tangents of dense weights."""

import copy
import functools

import pytest
import torch
from torch import nn

import logra.trust.forward as forward_module
import logra.trust.probe as probe_module
from logra.contracts import Delta
from logra.errors import NonFiniteProbeError, ProbeError
from logra.trust import TrustRegion
from logra.trust.measure import difference_kl, predicted_kl, realised_kl

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3", "mlp")
# transformers computes RMS norms (all but gpt2) and the softmax of attention in fp32 even for a float64 model, so two
# correct results agree to fp32 rounding there, and to float64 rounding in the others.
EXACT = ("gpt2", "mlp")
TEMPERATURE = 0.7


def make_probe(tiny, **changes):
    return TrustRegion().make_probe(**{**tiny.batch(), "temperature": TEMPERATURE, **changes})


def reference_logits(model: nn.Module, tiny, weights=None) -> torch.Tensor:
    """Logits [33, vocab] at all generated tokens, row by row without padding, in the model's own eager attention."""
    batch = tiny.batch()
    rows = []
    for row in range(4):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][real][None]
        output = torch.func.functional_call(model, weights or {}, (ids,))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        positions = batch["loss_mask"][row][real].nonzero().flatten() - 1
        rows.append(logits[0, positions])
    return torch.cat(rows)


def eager_model(tiny, family: str) -> nn.Module:
    return tiny.model(family, **({} if family == "mlp" else {"attn_implementation": "eager"})).eval()


def dense_changes(model: nn.Module, deltas: dict[nn.Module, Delta]) -> dict[str, torch.Tensor]:
    """What each named weight loses, formed in full: (1 - decay) W + out_factor @ in_factor."""
    names = {module: name for name, module in model.named_modules()}
    changes = {}
    for module, delta in deltas.items():
        dense = delta.out_factor @ delta.in_factor
        dense = dense.T if type(module).__name__ == "Conv1D" else dense
        changes[f"{names[module]}.weight"] = (1 - delta.decay) * module.weight.detach() + dense
    return changes


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of the first torch.func.jvp of a process
@pytest.mark.parametrize("decay", [1.0, 0.9999])
@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_is_the_tangent_of_the_dense_weights(tiny, family, decay):
    """The reference differentiates the logits along dense dW by torch.func.jvp and takes 1/2 Var_p of the result.

    Catches a wrong sign between modules, the tangent of earlier targets overwritten, a decayed bias, transposed Conv1D
    factors, the temperature, and columns shifted by one.
    """
    model = eager_model(tiny, family)
    deltas = tiny.propose(model, ratio=1e-4, decay=decay)
    changes = dense_changes(model, deltas)
    weights = {name: model.get_parameter(name).detach() for name in changes}
    tangents = {name: -change for name, change in changes.items()}
    logits, tangent = torch.func.jvp(lambda w: reference_logits(model, tiny, w), (weights,), (tangents,))
    p = (logits / TEMPERATURE).softmax(-1)
    moved = tangent / TEMPERATURE
    expected = 0.5 * ((p * moved**2).sum(-1) - (p * moved).sum(-1) ** 2).mean().item()
    tolerance = 1e-8 if family in EXACT else 1e-5
    assert predicted_kl(model, make_probe(tiny), deltas) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_realised_is_the_kl_of_changed_weights(tiny, family):
    """The reference writes the dense change into a copy of the model. Catches an injection at the wrong place."""
    model = eager_model(tiny, family)
    deltas = tiny.propose(model, ratio=1e-2, decay=0.999)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, change in dense_changes(model, deltas).items():
            changed.get_parameter(name).sub_(change)
        log_p = (reference_logits(model, tiny) / TEMPERATURE).log_softmax(-1)
        log_q = (reference_logits(changed, tiny) / TEMPERATURE).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    tolerance = 1e-8 if family in EXACT else 1e-4
    assert realised_kl(model, make_probe(tiny), deltas) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("measure", [predicted_kl, realised_kl])
def test_hooks_of_the_user_come_after_the_injection(tiny, measure):
    """A hook that doubles a target's output doubles its change too. Catches an injection behind it."""
    model = tiny.model("mlp")
    deltas = tiny.propose(model, ratio=1e-3)
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        doubled.up.weight.mul_(2)
        doubled.up.bias.mul_(2)
    expected = measure(
        doubled, make_probe(tiny), {doubled.up: deltas[model.up].scaled(2.0), doubled.head: deltas[model.head]}
    )
    model.up.register_forward_hook(lambda module, args, output: 2 * output)
    assert measure(model, make_probe(tiny), deltas) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_meets_the_realised_kl_at_small_steps(tiny, family):
    """The claim of the package: they differ by curvature only, below 1 % at a relative step of 1e-3."""
    model = tiny.model(family)
    deltas = tiny.propose(model, ratio=1e-3)
    predicted = predicted_kl(model, make_probe(tiny), deltas)
    assert realised_kl(model, make_probe(tiny), deltas) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_difference_agrees_with_tangent(tiny, family):
    """First-order error of a step of 1/128 of a proposal of about 1e-3 nats."""
    model = tiny.model(family)
    deltas = tiny.propose(model, ratio=1e-2)
    predicted = predicted_kl(model, make_probe(tiny), deltas)
    assert difference_kl(model, make_probe(tiny), deltas) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mlp"])
def test_padding_does_not_change_the_number(tiny, family, measure):
    """Catches positions counted from the padding, and attention to it: more left padding must change no bit."""
    model = tiny.model(family)
    deltas = tiny.propose(model, ratio=1e-3)
    expected = measure(model, make_probe(tiny), deltas)
    assert measure(model, make_probe(tiny, **tiny.batch(left=9, right=4)), deltas) == expected


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
def test_same_inputs_same_number(tiny, measure):
    """A model with dropout 0.5 in training mode. Catches dropout left on."""
    model = tiny.model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    deltas = tiny.propose(model, ratio=1e-3)
    assert measure(model, make_probe(tiny), deltas) == measure(model, make_probe(tiny), deltas)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
@pytest.mark.parametrize("family", ["llama", "mlp"])
def test_splitting_into_forwards_and_chunks_does_not_change_the_number(tiny, monkeypatch, family, measure):
    """Catches means of means (chunks have different sizes), and positions of one batch read from another."""
    model = tiny.model(family)
    deltas = tiny.propose(model, ratio=1e-2)
    expected = measure(model, make_probe(tiny), deltas)
    monkeypatch.setattr(probe_module, "FORWARD_TOKENS", 30)
    monkeypatch.setattr(forward_module, "CHUNK_TOKENS", 4)
    # fp32 norms and softmax again.
    assert measure(model, make_probe(tiny), deltas) == pytest.approx(expected, rel=1e-4)


def test_head_never_sees_more_than_a_chunk(tiny, monkeypatch):
    """Catches [tokens, vocabulary] logits for the whole batch."""
    model = tiny.model("llama")
    monkeypatch.setattr(forward_module, "CHUNK_TOKENS", 8)
    sizes = []
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[:-1].numel()))
    predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3))
    assert max(sizes) == 8


@pytest.mark.parametrize("measure", [predicted_kl, realised_kl])
def test_no_weight_is_written_and_no_gradient_left(tiny, measure):
    model = tiny.model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model, make_probe(tiny), tiny.propose(model, ratio=1e-2))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


class Detached(nn.Module):
    """A model whose last step before the logits removes the tangent: entirely, or all but zeros."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, tokens):
        logits = self.inner(tokens)
        return logits.detach() if self.how == "detach" else logits.detach() + 0 * logits


@pytest.mark.parametrize("how", ["detach", "zero"])
def test_a_lost_tangent_is_an_error(tiny, how):
    """Catches a lost tangent that reads as KL = 0 and lets any step pass."""
    model = Detached(tiny.model("mlp"), how)
    with pytest.raises(ProbeError, match="does not reach the logits"):
        predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3))


def test_difference_reports_an_update_without_effect(tiny):
    model = tiny.model("mlp")
    deltas = {module: delta.scaled(1e-30) for module, delta in tiny.propose(model, ratio=1.0).items()}
    with pytest.raises(ProbeError, match="does not reach the logits"):
        difference_kl(model, make_probe(tiny), deltas)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl])
def test_zero_proposals_are_named(tiny, measure):
    """Catches a division by a KL of zero, and a message about lost tangents for a gradient that was zero."""
    model = tiny.model("mlp")
    deltas = {module: delta.scaled(0.0) for module, delta in tiny.propose(model, ratio=1.0).items()}
    with pytest.raises(ProbeError, match="every proposed weight change is zero"):
        measure(model, make_probe(tiny), deltas)
    assert realised_kl(model, make_probe(tiny), deltas) == pytest.approx(0.0, abs=1e-30)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
def test_nan_logits_are_named(tiny, measure):
    model = tiny.model("mlp")
    deltas = tiny.propose(model, ratio=1e-3)
    with torch.no_grad():
        model.head.weight[5, 3] = float("inf")
    with pytest.raises(NonFiniteProbeError, match="logits on the probe are not finite"):
        measure(model, make_probe(tiny), deltas)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_proposals_are_named(tiny, measure, value):
    """Catches an infinite factor in front of a tanh, which saturates and gives a finite KL."""
    model = tiny.model("mlp")
    deltas = tiny.propose(model, ratio=1e-3)
    deltas[model.up].out_factor[0, 0] = value
    with pytest.raises(NonFiniteProbeError, match="changes that are not finite"):
        measure(model, make_probe(tiny), deltas)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
def test_an_effect_that_overflows_is_named(tiny, measure):
    """Finite factors whose effect on the logits is beyond the largest float."""
    model = tiny.model("mlp").float()
    deltas = tiny.propose(model, ratio=1e-3)
    deltas[model.head].out_factor.fill_(1e38)
    deltas[model.head].in_factor.fill_(1e38)
    with pytest.raises(NonFiniteProbeError, match="KL of the proposed update is"):
        measure(model, make_probe(tiny), deltas)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
def test_targets_of_another_model_are_an_error(tiny, measure):
    deltas = tiny.propose(tiny.model("mlp"), ratio=1e-3)
    with pytest.raises(ProbeError, match="no target module ran"):
        measure(tiny.model("mlp"), make_probe(tiny), deltas)


def test_targets_that_do_not_run_are_counted(tiny):
    model = tiny.model("mlp")
    model.unused = nn.Linear(3, 3).double()
    with pytest.warns(UserWarning, match="1 of 3 target modules did not run"):
        predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3))


class NoForwardDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_operations_without_a_forward_derivative_are_named_and_differences_still_work(tiny):
    model = tiny.model("mlp")
    deltas = tiny.propose(model, ratio=1e-2)
    expected = predicted_kl(model, make_probe(tiny), deltas)
    model.dropout.forward = NoForwardDerivative.apply
    with pytest.raises(ProbeError, match="without a forward derivative"):
        predicted_kl(model, make_probe(tiny), deltas)
    assert difference_kl(model, make_probe(tiny), deltas) == pytest.approx(expected, rel=0.01)


def test_other_errors_pass_through(tiny):
    """Catches an `except` that hides a bug of the model behind advice about derivatives."""
    model = tiny.model("mlp")
    model.up.weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        predicted_kl(model, make_probe(tiny), {model.head: Delta(torch.ones(64, 1), torch.ones(1, 16))})


@pytest.mark.parametrize("family", ["llama", "mlp"])
def test_verify_shrinks_until_the_budget_is_met(tiny, family):
    """The loop of the optimizer: predict at a far too long step, scale, measure, shrink; ends at or below the ratio."""
    model = tiny.model(family)
    region = TrustRegion(kl_budget=0.05, alpha_max=100.0)
    probe = make_probe(tiny)
    deltas = {module: delta.scaled(3.0) for module, delta in tiny.propose(model, ratio=1.0).items()}
    factor, attempt = 1.0, 0
    while True:
        scaled = {module: delta.scaled(factor) for module, delta in deltas.items()}
        verdict = region.verify(model, probe, scaled, budget=0.05, attempt=attempt)
        if verdict.action != "shrink":
            break
        factor, attempt = factor * verdict.factor, attempt + 1
    assert attempt >= 1
    assert verdict.action == "accept"
    assert 0 < verdict.realised_kl <= 1.5 * 0.05


@pytest.mark.parametrize("family", ["llama", "gpt2", "mlp"])
def test_the_check_reuses_what_the_prediction_ran_until_the_weights_change(tiny, family):
    """One forward less, the same number; a weight that moves in between makes it void. Catches a stale base."""
    model, probe = tiny.model(family), make_probe(tiny)
    deltas = tiny.propose(model, ratio=1e-2)
    alone = realised_kl(model, make_probe(tiny), deltas)
    predicted_kl(model, probe, deltas)
    forwards = []
    handle = model.register_forward_hook(lambda *args: forwards.append(1))
    assert realised_kl(model, probe, deltas) == pytest.approx(alone, rel=1e-6)
    num_reused = len(forwards)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    forwards.clear()
    moved = realised_kl(model, probe, deltas)
    handle.remove()
    assert num_reused < len(forwards) or family == "mlp"  # its output is logits, too large to keep
    assert moved == pytest.approx(realised_kl(model, make_probe(tiny), deltas), rel=1e-12)
    assert moved != pytest.approx(alone, rel=1e-3)


def test_a_low_precision_prediction_leaves_nothing_to_the_check(tiny):
    """bfloat16 logits are too coarse for a difference of two forwards."""
    model, probe = tiny.model("llama").bfloat16(), make_probe(tiny)
    predicted_kl(model, probe, tiny.propose(model, ratio=1e-2))
    assert not probe.base.holds_for(model)


def test_autocast_inside_the_model_leaves_nothing_to_the_check_either(tiny):
    """Its weights and hidden states are fp32, only the products in between are not. Catches a look at dtypes alone."""
    model, probe = tiny.model("llama").float(), make_probe(tiny)
    deltas = tiny.propose(model, ratio=1e-2)
    expected = realised_kl(model, make_probe(tiny), deltas)
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(*args, **kwargs)

    model.forward = forward
    predicted_kl(model, probe, deltas)
    assert not probe.base.holds_for(model)
    assert realised_kl(model, probe, deltas) == pytest.approx(expected, rel=1e-3)
