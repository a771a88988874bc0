"""bfloat16 models: the KL of a small step must not be the noise of bfloat16."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from logra.contracts import Delta
from logra.trust import TrustRegion, precision
from logra.trust.measure import difference_kl, predicted_kl, realised_kl
from logra.trust.precision import Float32Forward


def make_probe(tiny):
    return TrustRegion().make_probe(**tiny.batch(), temperature=1.0)


def transfer(deltas: dict[nn.Module, Delta], source: nn.Module, target: nn.Module) -> dict[nn.Module, Delta]:
    modules = dict(target.named_modules())
    return {
        modules[name]: Delta(deltas[module].out_factor.float(), deltas[module].in_factor.float())
        for name, module in source.named_modules()
        if module in deltas
    }


@pytest.mark.parametrize("measure", [difference_kl, realised_kl])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mlp"])
def test_differences_of_a_bf16_model_are_those_of_its_fp32_copy(tiny, family, measure):
    """Catches a difference of bf16 forwards: at this step its rounding noise is hundreds of times the KL."""
    low = tiny.model(family).bfloat16()
    wide = copy.deepcopy(low).float()
    proposal = tiny.propose(low, ratio=1e-3)
    expected = measure(wide, make_probe(tiny), transfer(proposal, low, wide))
    assert expected < 1e-4
    # Both run in fp32; the order of summation of an fp32 kernel is the only difference.
    assert measure(low, make_probe(tiny), transfer(proposal, low, low)) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mlp"])
def test_prediction_of_a_bf16_model_is_close_to_that_of_its_fp32_copy(tiny, family):
    """A tangent is no difference: bf16 rounds it to 0.4 % an operation, and nothing cancels."""
    low = tiny.model(family).bfloat16()
    wide = copy.deepcopy(low).float()
    proposal = tiny.propose(low, ratio=1e-3)
    expected = predicted_kl(wide, make_probe(tiny), transfer(proposal, low, wide))
    assert predicted_kl(low, make_probe(tiny), transfer(proposal, low, low)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("measure", [predicted_kl, difference_kl, realised_kl])
@pytest.mark.parametrize("family", ["llama", "mlp"])
def test_autocast(tiny, family, measure):
    """fp32 weights under bf16 autocast: differences stay fp32, the tangent is in bf16."""
    model = tiny.model(family).float()
    deltas = transfer(tiny.propose(model, ratio=1e-3), model, model)
    expected = measure(model, make_probe(tiny), deltas)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure(model, make_probe(tiny), deltas)
    assert found == pytest.approx(expected, rel=0.05 if measure is predicted_kl else 1e-3)


def test_autocast_that_a_model_enters_by_itself_is_off(tiny):
    """Training libraries wrap `model.forward` in autocast; catches a mode that only looks at the surroundings."""
    model = tiny.model("mlp").float()
    deltas = transfer(tiny.propose(model, ratio=1e-3), model, model)
    expected = realised_kl(model, make_probe(tiny), deltas)
    inner = model.forward

    def forward(tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(tokens)

    model.forward = forward
    assert realised_kl(model, make_probe(tiny), deltas) == pytest.approx(expected, rel=1e-3)


def test_operations_in_fp32_mode():
    """Parameters keep their dtype; results, and the dtype that code reads from a weight, are fp32; fp64 is left alone."""
    layer = nn.Linear(4, 3).bfloat16()
    table = nn.Embedding(5, 4).bfloat16()
    x = torch.randn(2, 4)
    with torch.no_grad(), Float32Forward("cpu"):
        y = layer(x)
        rows = table(torch.tensor([1, 2]))
        seen = layer.weight.dtype
        wide = torch.ones(2, dtype=torch.float64) * 2
        layer.bias.zero_()
    assert (y.dtype, rows.dtype, seen, wide.dtype) == (torch.float32, torch.float32, torch.float32, torch.float64)
    assert layer.weight.dtype == torch.bfloat16
    assert (layer.bias == 0).all()  # in-place operations reach the tensor, not a copy
    torch.testing.assert_close(rows, table.weight[[1, 2]].float(), rtol=0, atol=0)


def test_a_large_weight_is_cast_by_blocks_of_rows(monkeypatch):
    """Catches a whole fp32 copy of the head, rows that are lost at the borders, and a bias added twice."""
    monkeypatch.setattr(precision, "BLOCK_BYTES", 4 * 8 * 5)
    head = nn.Linear(8, 13).bfloat16()
    x = torch.randn(2, 3, 8)
    largest = LargestCast()
    with Float32Forward("cpu"), largest:
        found = head(x)
    assert found.dtype == torch.float32
    assert torch.allclose(found, x @ head.weight.float().T + head.bias.float(), atol=1e-5)
    assert largest.num_elements == 5 * 8


class LargestCast(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.num_elements = max(self.num_elements, result.numel())
        return result
