"""What a probe needs from a model, and that it leaves no trace."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import logra.trust.attention as attention_module
from logra.errors import ProbeError
from logra.trust import TrustRegion
from logra.trust.attention import differentiable_attention
from logra.trust.measure import predicted_kl, realised_kl


def make_probe(tiny):
    return TrustRegion().make_probe(**tiny.batch(), temperature=1.0)


@pytest.mark.parametrize("measure", [predicted_kl, realised_kl])
@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(tiny, measure, fails):
    """Catches clean-up outside `finally`: attention names, training flags, forward methods, hooks, random state."""
    model = tiny.model("llama", attn_implementation="sdpa")
    model.model.layers[0].eval()  # a frozen layer among training ones
    deltas = tiny.propose(model, ratio=1e-3)
    hooks = []
    if fails:
        hooks.append(model.model.norm.register_forward_hook(raise_stop))
    flags = [module.training for module in model.modules()]
    counts = [len(module._forward_hooks) for module in model.modules()]
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="stop"):
            measure(model, make_probe(tiny), deltas)
    else:
        measure(model, make_probe(tiny), deltas)
    assert model.config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == flags
    assert [len(module._forward_hooks) for module in model.modules()] == counts
    assert "forward" not in vars(model.model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def raise_stop(*args):
    raise RuntimeError("stop")


def test_an_instance_forward_is_put_back(tiny):
    """Libraries patch `module.forward`; catches a `del` that would remove their patch."""
    model = tiny.model("llama")
    patched = model.model.forward
    model.model.forward = patched
    predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3))
    assert vars(model.model)["forward"] is patched


def test_random_numbers_of_the_model_do_not_move_the_training_run(tiny):
    model = tiny.model("mlp")
    model.dropout.forward = lambda x: x + 0 * torch.rand(())
    state = torch.get_rng_state()
    predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3))
    assert torch.equal(torch.get_rng_state(), state)


class Pair(nn.Module):
    """Two transformers models with configs of their own, as in a multimodal or an actor-critic module."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, input_ids, attention_mask):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return SimpleNamespace(logits=self.first(**inputs).logits + self.second(**inputs).logits)


def test_every_config_is_switched_and_restored(tiny):
    """Catches a switch of the outer model only: the inner sdpa kernels would raise."""
    first, second = tiny.model("llama", attn_implementation="eager"), tiny.model("qwen3", attn_implementation="sdpa")
    pair = Pair(first, second).train()
    with differentiable_attention(pair):
        assert {first.config._attn_implementation, second.config._attn_implementation} == {"logra_probe"}
    assert (first.config._attn_implementation, second.config._attn_implementation) == ("eager", "sdpa")
    assert predicted_kl(pair, make_probe(tiny), tiny.propose(pair, ratio=1e-3)) > 0
    assert (first.config._attn_implementation, second.config._attn_implementation) == ("eager", "sdpa")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3"])
def test_blocks_of_queries_do_not_change_attention(tiny, monkeypatch, family):
    """Catches a mask that is not cut with the queries, a lost sliding window, soft cap or scaling."""
    model = tiny.model(family, attn_implementation="eager").eval()
    (batch,) = make_probe(tiny).batches
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    real = batch.attention_mask.bool()
    with torch.no_grad():
        expected = model(**inputs).logits
        # Four rows, four heads, 16 keys: 5 queries a block.
        monkeypatch.setattr(attention_module, "SCORE_ELEMENTS", 4 * 4 * 16 * 5)
        with differentiable_attention(model):
            blocked = model(**inputs).logits
    # Softmax of attention and norms are fp32 inside these models.
    torch.testing.assert_close(blocked[real], expected[real], rtol=0, atol=2e-5)


def test_sdpa_and_eager_models_get_the_same_prediction(tiny):
    """Catches a custom attention name for which transformers builds no mask: then the future would be visible."""
    numbers = []
    for implementation in ("sdpa", "eager"):
        model = tiny.model("llama", attn_implementation=implementation)
        numbers.append(predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3)))
    assert numbers[0] == numbers[1]


def test_activation_checkpointing_of_transformers_is_off(tiny):
    """Reentrant checkpointing has no forward derivative; evaluation mode switches it off."""
    model = tiny.model("llama")
    expected = predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3))
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3)) == expected


def test_activation_checkpointing_of_a_plain_module_is_harmless(tiny):
    model = tiny.model("mlp")
    deltas = tiny.propose(model, ratio=1e-3)
    expected = predicted_kl(model, make_probe(tiny), deltas)
    model.dropout.forward = lambda x: checkpoint(lambda y: y * 1.0, x, use_reentrant=False)
    assert predicted_kl(model, make_probe(tiny), deltas) == expected


class KeywordsOnly(nn.Module):
    """A wrapper that names no argument, as adapters and parallel wrappers are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        assert not args
        assert set(kwargs) == {"input_ids", "attention_mask"}
        return self.inner(**kwargs)


def test_wrappers_get_ids_and_mask_by_name(tiny):
    """The same number through full logits (wrapper) and through chunks of the head (bare model)."""
    model = tiny.model("llama")
    deltas = tiny.propose(model, ratio=1e-3)
    expected = predicted_kl(model, make_probe(tiny), deltas)
    assert predicted_kl(KeywordsOnly(model), make_probe(tiny), deltas) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (lambda logits: logits[:, 0], r"\(4, 64\)"),
        (lambda logits: logits[:, 1:], r"\(4, \d+, 64\)"),
        (lambda logits: (logits,), "tuple"),
        (lambda logits: SimpleNamespace(scores=logits), "SimpleNamespace"),
    ],
)
def test_outputs_that_are_not_logits_are_named(tiny, output, found):
    model = tiny.model("mlp")
    deltas = tiny.propose(model, ratio=1e-3)
    wrapper = nn.Module()
    wrapper.inner = model
    wrapper.forward = lambda tokens: output(model(tokens))
    with pytest.raises(ProbeError, match=rf"Module returned {found}"):
        predicted_kl(wrapper, make_probe(tiny), deltas)


def test_a_backbone_without_named_outputs_is_named(tiny):
    model = tiny.model("llama", return_dict=False)
    with pytest.raises(ProbeError, match="return_dict=True"):
        predicted_kl(model, make_probe(tiny), tiny.propose(model, ratio=1e-3))
