"""Fisher products and gains of several weight changes against explicit jvps of dense weights and full logits."""

import pytest
import torch

import logra.trust.probe as probe_module
import logra.trust.tangents as tangents_module
from logra.contracts import Delta
from logra.errors import NonFiniteProbeError, ProbeError
from logra.trust.measure import predicted_kl
from logra.trust.probe import build_probe
from logra.trust.tangents import DenseDelta, tangent_moments

TEMPERATURE = 0.7
ADVANTAGES = torch.tensor([1.5, -0.5, 0.25, -1.0])  # of the four rows of the batch


def make_probe(tiny):
    return build_probe(
        **tiny.batch(left=2, right=1),
        temperature=TEMPERATURE,
        min_responses=4,
        min_tokens=1,
        max_response_tokens=100,
        generator=torch.Generator().manual_seed(0),
    )


def make_changes(tiny, model):
    """A change of all layers, one of the first layer alone, and one that is given in full."""
    everything = tiny.propose(model, ratio=1e-2)
    first = next(iter(everything))
    generator = torch.Generator().manual_seed(3)
    weight = tiny.canonical(first).detach()
    dense = DenseDelta(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    mixed = {module: delta.scaled(-1.0) for module, delta in everything.items()} | {first: dense}
    return [everything, {first: everything[first].scaled(3.0)}, mixed]


def dense_of(tiny, module, delta):
    dense = delta.out_factor if isinstance(delta, DenseDelta) else delta.out_factor @ delta.in_factor
    return dense.T if type(module).__name__ == "Conv1D" else dense


def reference(tiny, model, changes):
    """Logits [t, V], tangents [k, t, V], tokens [t] and response [t] of every generated token, without padding."""
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    batch = tiny.batch()
    logits, tangents, tokens, responses = [], [], [], []
    for row in range(4):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][real][None]
        generated = batch["loss_mask"][row][real].nonzero().flatten()

        def run(weights, ids=ids, generated=generated):
            output = torch.func.functional_call(model, weights, (ids,))
            return (output if isinstance(output, torch.Tensor) else output.logits)[0, generated - 1]

        moved = []
        for change in changes:
            weights = {names[module]: module.weight.detach() for module in change}
            directions = {names[module]: -dense_of(tiny, module, delta) for module, delta in change.items()}
            primal, tangent = torch.func.jvp(run, (weights,), (directions,))
            moved.append(tangent)
        logits.append(primal)
        tangents.append(torch.stack(moved))
        tokens.append(ids[0, generated])
        responses.append(torch.full((len(generated),), row))
    return torch.cat(logits), torch.cat(tangents, dim=1), torch.cat(tokens), torch.cat(responses)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mlp"])
def test_products_and_gains_are_those_of_explicit_tangents(tiny, family, monkeypatch):
    """The metric is written out as a matrix, diag(p) - p pᵀ; gains go through d log softmax. Catches a forgotten
    temperature, a metric of another change, advantages in another order than the probe's, and a sign."""
    monkeypatch.setattr(probe_module, "FORWARD_TOKENS", 40)  # several forwards
    monkeypatch.setattr(tangents_module, "CHUNK_TOKENS", 12)  # several chunks of 4 tokens each
    model = tiny.model(family, **({} if family == "mlp" else {"attn_implementation": "eager"})).eval()
    changes = make_changes(tiny, model)
    probe = make_probe(tiny)
    assert len(probe.batches) > 1
    moments = tangent_moments(model, probe, changes, ADVANTAGES[probe.selected])

    logits, tangents, tokens, responses = reference(tiny, model, changes)
    p = torch.softmax(logits / TEMPERATURE, dim=-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    scaled = tangents / TEMPERATURE
    expected = torch.einsum("itv,tvw,jtw->ij", scaled, fisher, scaled) / len(tokens)
    # transformers computes norms and softmax of attention in fp32 also in a float64 model; gpt2 and mlp do not.
    tolerance = {"rtol": 2e-5, "atol": 1e-9} if family == "llama" else {"rtol": 1e-9, "atol": 1e-14}
    torch.testing.assert_close(moments.covariance, expected, **tolerance)

    slopes = scaled - (p * scaled).sum(-1, keepdim=True)
    slopes = slopes.gather(-1, tokens.expand(len(changes), -1)[..., None])[..., 0]
    gains = (slopes * ADVANTAGES[responses]).sum(-1) / 4
    torch.testing.assert_close(moments.gains, gains, rtol=tolerance["rtol"], atol=1e-7)

    cosine = expected[0, 1] / (expected[0, 0] * expected[1, 1]).sqrt()
    assert moments.cosine(0, 1) == pytest.approx(cosine.item(), rel=1e-4)
    assert abs(moments.cosine(0, 2)) < 0.999 and moments.cosine(0, 0) == pytest.approx(1.0)
    assert moments.gain_per_root_kl(2) == pytest.approx((gains[2] / (expected[2, 2] / 2).sqrt()).item(), rel=1e-4)


def test_kl_is_the_predicted_kl(tiny):
    model = tiny.model("qwen3")
    probe = make_probe(tiny)
    changes = make_changes(tiny, model)[:2]
    moments = tangent_moments(model, probe, changes)
    assert moments.gains is None
    for index, change in enumerate(changes):
        assert moments.kl(index) == pytest.approx(predicted_kl(model, probe, change), rel=1e-6)


def test_a_target_in_the_head_moves_with_its_own_change(tiny):
    """The head runs once per change and chunk: with the changes mixed up, both would get the last one's tangent."""
    model = tiny.model("llama", tie_word_embeddings=False)
    probe = make_probe(tiny)
    head = model.lm_head
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((64, 2), (2, 32))]
    change = {head: Delta(*factors)}
    moments = tangent_moments(model, probe, [change, {head: change[head].scaled(2.0)}])
    assert moments.kl(1) == pytest.approx(4 * moments.kl(0), rel=1e-9)
    assert moments.kl(0) == pytest.approx(predicted_kl(model, probe, change), rel=1e-9)


def test_bad_input(tiny):
    model = tiny.model("mlp")
    probe = make_probe(tiny)
    change = tiny.propose(model, ratio=1e-2)
    with pytest.raises(ProbeError, match=r"advantages has shape \(3,\): the probe has 4 responses"):
        tangent_moments(model, probe, [change], ADVANTAGES[:3])
    with pytest.raises(NonFiniteProbeError):
        tangent_moments(model, probe, [change], torch.tensor([1.0, float("nan"), 0.0, 0.0]))
    module, delta = next(iter(change.items()))
    with pytest.raises(NonFiniteProbeError):
        tangent_moments(model, probe, [{module: delta.scaled(float("inf"))}])
    other = torch.nn.Linear(2, 2)
    with pytest.raises(ProbeError, match="no target module ran"):
        tangent_moments(model, probe, [{other: Delta(torch.ones(2, 1), torch.ones(1, 2))}])


def test_a_lost_tangent_is_an_error(tiny):
    class Detached(tiny.Mlp):
        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.head(torch.tanh(self.up(torch.cat([x, x], dim=-1))).detach().clone())

    torch.manual_seed(0)
    model = Detached().double()
    generator = torch.Generator().manual_seed(0)
    change = {model.up: Delta(torch.randn(16, 1, generator=generator).double(), torch.ones(1, 32).double())}
    with pytest.raises(ProbeError, match="does not reach the logits of Detached"):
        tangent_moments(model, make_probe(tiny), [change])
