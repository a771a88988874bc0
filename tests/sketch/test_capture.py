"""Sketches accumulated by backward equal the sketches of the dense gradient of an independent, unpatched model."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from logra.errors import CaptureError
from logra.sketch import Capture, find_targets
from logra.sketch.accumulate import SharedSigns, _sum_of_squares
from logra.sketch.capture import SketchSpec
from logra.sketch.reference import sketch_in, sketch_out
from logra.update import SignFactor

TARGETS = ("q_proj", "k_proj", "o_proj")


def attach(model, *, two_sided=True, rank=6, out_side=frozenset(), moments=False, patterns=TARGETS):
    targets = find_targets(model, patterns)
    spec = SketchSpec(rank=rank, two_sided=two_sided, seed=3, input_moments=moments)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for target in targets:
        target.parameter.requires_grad_(True)
    capture = Capture(model, targets, spec, out_side)
    capture.begin_window(5)
    return capture, targets


def dense_gradients(model, losses):
    """Gradients of an unpatched copy in float64, by fqn."""
    model = copy.deepcopy(model).double().requires_grad_(True)
    for loss in losses:
        loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_sketches(capture, targets, dense, rtol=2e-5):
    """rtol: fp32 sums of some hundred products against float64."""
    for target in targets:
        grad = dense[target.fqn]
        grad = grad.T if target.transposed else grad
        sketch = capture.sketches()[target.fqn]
        exponents = capture.exponents(target.fqn)
        scales = None if exponents is None else torch.ldexp(torch.ones(target.in_features), exponents)
        if sketch.on_in is not None:
            expected = sketch_in(
                grad, capture.in_signs(target.fqn).matrix(capture.spec.rank, target.in_features), scales
            )
            assert sketch.on_in.dtype == torch.float32
            torch.testing.assert_close(
                sketch.on_in.double(), expected, rtol=rtol, atol=rtol * expected.abs().max().item()
            )
        if sketch.on_out is not None:
            signs = capture.out_signs(target.fqn).matrix(capture.spec.rank_out, target.out_features)
            expected = sketch_out(grad, signs)
            torch.testing.assert_close(
                sketch.on_out.double(), expected, rtol=rtol, atol=rtol * expected.abs().max().item()
            )
        assert sketch.tensors(), target.fqn
        assert target.parameter.grad is None


def cross_entropy(ids, weight=1.0):
    def loss(model):
        logits = model(ids)
        return weight * nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return loss


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("out", [False, True])
def test_sketches_equal_dense_over_unequal_micro_batches(tiny_lm, token_ids, two_sided, out):
    losses = [cross_entropy(token_ids), cross_entropy(token_ids[:1, :4], 0.3), cross_entropy(token_ids[2:], 2.0)]
    dense = dense_gradients(tiny_lm, losses)
    names = frozenset(t.fqn for t in find_targets(tiny_lm, TARGETS)) if out and not two_sided else frozenset()
    capture, targets = attach(tiny_lm, two_sided=two_sided, out_side=names)
    for loss in losses:
        loss(tiny_lm).backward()
    assert_sketches(capture, targets, dense)


def test_input_gradients_and_bias_gradients_are_those_of_the_dense_model(make_lm, token_ids):
    model = make_lm(bias=True)
    dense = dense_gradients(model, [cross_entropy(token_ids)])
    Capture(model, find_targets(model, TARGETS), SketchSpec(rank=4, two_sided=True, seed=0)).begin_window(0)
    cross_entropy(token_ids)(model).backward()
    for name in ("embed.weight", "layers.0.q_proj.bias", "layers.1.o_proj.bias", "lm_head.weight"):
        grad = dict(model.named_parameters())[name].grad
        torch.testing.assert_close(grad.double(), dense[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_counts_each_gradient_once(tiny_lm, token_ids, use_reentrant):
    dense = dense_gradients(tiny_lm, [cross_entropy(token_ids)] * 2)
    capture, targets = attach(tiny_lm)

    def loss(model):
        x = model.embed(token_ids)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return nn.functional.cross_entropy(model.lm_head(x)[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten())

    loss(tiny_lm).backward()
    loss(tiny_lm).backward()
    assert_sketches(capture, targets, dense)


def test_module_called_twice_in_one_forward(tiny_lm, token_ids):
    def loss(model):
        x = model.layers[0](model.layers[0](model.embed(token_ids)))
        return model.lm_head(model.layers[1](x)).square().mean()

    dense = dense_gradients(tiny_lm, [loss])
    capture, targets = attach(tiny_lm)
    loss(tiny_lm).backward()
    assert_sketches(capture, targets, dense)


def test_in_place_change_of_a_shared_input_is_not_served_from_the_cache(token_ids):
    """A cache keyed by the tensor object alone would project the stale values for the second sibling."""

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(23, 16)
            self.q_proj = nn.Linear(16, 12, bias=False)
            self.k_proj = nn.Linear(16, 12, bias=False)

        def forward(self, ids):
            x = self.embed(ids).detach()
            q = self.q_proj(x.clone())
            with torch.no_grad():
                x.mul_(3.0)
            return q * self.k_proj(x)

    torch.manual_seed(0)
    model = InPlace()
    dense = dense_gradients(model, [lambda m: m(token_ids).square().mean()])
    capture, targets = attach(model, patterns=("q_proj", "k_proj"), two_sided=False)
    model(token_ids).square().mean().backward()
    assert_sketches(capture, targets, dense)


def test_conv1d_is_sketched_in_the_canonical_orientation(token_ids):
    from transformers.pytorch_utils import Conv1D

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(23, 16)
            self.c_fc = Conv1D(28, 16)

        def forward(self, ids):
            return self.c_fc(self.embed(ids))

    torch.manual_seed(0)
    model = Gpt()
    plain = model(token_ids)
    dense = dense_gradients(model, [lambda m: m(token_ids).square().mean()])
    capture, targets = attach(model, patterns="c_fc")
    assert (targets[0].out_features, targets[0].in_features) == (28, 16)
    torch.testing.assert_close(model(token_ids), plain)
    model(token_ids).square().mean().backward()
    assert_sketches(capture, targets, dense)


def test_input_scaling_enters_the_sketch_and_moments_are_means(tiny_lm, token_ids):
    dense = dense_gradients(tiny_lm, [cross_entropy(token_ids)])
    capture, targets = attach(tiny_lm, two_sided=False, moments=True)
    for target in targets:
        capture.set_exponents(target.fqn, torch.arange(target.in_features, dtype=torch.int32) % 5 - 2)
    cross_entropy(token_ids)(tiny_lm).backward()
    assert_sketches(capture, targets, dense)
    x = tiny_lm.embed(token_ids).reshape(-1, 40)
    moments = capture.input_moments("layers.0.q_proj.weight")
    assert moments is not None
    square_sum, num_tokens = moments
    assert num_tokens == token_ids.numel()
    torch.testing.assert_close(square_sum / num_tokens, x.square().mean(0))


def test_autocast_sketches_are_fp32_and_close_to_the_dense_autocast_gradient(tiny_lm, token_ids):
    def loss(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(token_ids)(model)

    reference = copy.deepcopy(tiny_lm)
    loss(reference).backward()
    dense = {name: p.grad for name, p in reference.named_parameters()}
    capture, targets = attach(tiny_lm)
    out = tiny_lm(token_ids)
    loss(tiny_lm).backward()
    assert out.dtype == torch.float32
    # Both gradients carry bf16 rounding (2^-8 relative) at every product.
    assert_sketches(capture, targets, dense, rtol=0.03)


@pytest.mark.parametrize("two_sided", [True, False])
def test_no_tensor_of_a_dense_gradients_shape_is_allocated(tiny_lm, token_ids, record_shapes, two_sided):
    capture, targets = attach(tiny_lm, two_sided=two_sided)
    with record_shapes() as record:
        cross_entropy(token_ids)(tiny_lm).backward()
    forbidden = {(t.out_features, t.in_features) for t in targets} | {(t.in_features, t.out_features) for t in targets}
    assert record.shapes, "the mode recorded nothing"
    assert not forbidden & record.shapes
    # The recorder does see a dense gradient where there is one.
    dense = copy.deepcopy(tiny_lm).requires_grad_(True)
    with record_shapes() as record:
        cross_entropy(token_ids)(dense).backward()
    assert forbidden & record.shapes


def test_siblings_project_a_shared_tensor_once(tiny_lm, token_ids, monkeypatch):
    calls = []
    original = SignFactor.matrix
    monkeypatch.setattr(SignFactor, "matrix", lambda self, *a, **k: calls.append(self.name) or original(self, *a, **k))
    attach(tiny_lm, two_sided=False)
    cross_entropy(token_ids)(tiny_lm).backward()
    # q and k of a block read one tensor, o reads another: two projections a block for three targets.
    assert sorted(calls) == ["layers.0", "layers.0", "layers.1", "layers.1"]


def test_projections_do_not_outlive_the_backward_pass(tiny_lm, token_ids):
    capture, _ = attach(tiny_lm)
    loss = cross_entropy(token_ids)(tiny_lm)
    loss.backward()
    del loss
    assert all(not shared._projected for shared in capture._shared.values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at .grad of its own intermediates
def test_compile_after_attaching_works(tiny_lm, token_ids):
    dense = dense_gradients(tiny_lm, [cross_entropy(token_ids)])
    capture, targets = attach(tiny_lm)
    compiled = torch.compile(tiny_lm, backend="eager")
    cross_entropy(token_ids)(compiled).backward()
    assert_sketches(capture, targets, dense)


def test_copies_and_pickles_are_plain_models(tiny_lm, token_ids):
    """A patched forward copied by reference would run the copy with the original's weights."""
    capture, targets = attach(tiny_lm)
    for other in (copy.deepcopy(tiny_lm), pickle.loads(pickle.dumps(tiny_lm))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        assert not torch.equal(other(token_ids), tiny_lm(token_ids))
        cross_entropy(token_ids)(other).backward()
        assert other.layers[0].q_proj.weight.grad is not None
    assert not any(sketch.tensors() for sketch in capture.sketches().values())
    buffer = io.BytesIO()
    torch.save(tiny_lm.state_dict(), buffer)


def test_detach_restores_dense_training(tiny_lm, token_ids):
    capture, targets = attach(tiny_lm)
    capture.detach()
    cross_entropy(token_ids)(tiny_lm).backward()
    assert all(target.parameter.grad is not None for target in targets)
    assert not any(sketch.tensors() for sketch in capture.sketches().values())


def test_stale_backward_is_refused(tiny_lm, token_ids):
    capture, _ = attach(tiny_lm)
    loss = cross_entropy(token_ids)(tiny_lm)
    capture.begin_window(6)
    with pytest.raises(CaptureError, match="before the last step"):
        loss.backward()


def test_an_embedding_output_may_be_changed_in_place(tiny_lm, token_ids):
    def loss(model):
        x = model.embed(token_ids)
        x += 1
        return model.lm_head(model.layers[0](x)).square().mean()

    dense = dense_gradients(tiny_lm, [loss])
    capture, targets = attach(tiny_lm, patterns=("layers.0.*",))
    loss(tiny_lm).backward()
    assert_sketches(capture, targets, dense)


def test_a_second_capture_is_refused(tiny_lm):
    attach(tiny_lm)
    with pytest.raises(CaptureError, match="already belongs"):
        attach(tiny_lm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 64, 201])
def test_the_sum_of_squared_inputs_is_that_of_the_formula(dtype, num_tokens):
    torch.manual_seed(0)
    x = (torch.randn(num_tokens, 40) * torch.logspace(-6, 6, 40)).to(dtype)
    found = _sum_of_squares(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double().square().sum(0), rtol=1e-5, atol=0)


def test_siblings_of_one_width_share_the_signs_of_the_out_side(tiny_lm, token_ids, monkeypatch):
    made = []
    original = SignFactor.matrix

    def matrix(self, rank, width, **ranges):
        if self.side == "out":
            made.append((self.name, width))
        return original(self, rank, width, **ranges)

    monkeypatch.setattr(SignFactor, "matrix", matrix)
    capture, targets = attach(tiny_lm)
    cross_entropy(token_ids)(tiny_lm).backward()
    assert sorted(made) == sorted({(target.parent, target.out_features) for target in targets})
    cross_entropy(token_ids)(tiny_lm).backward()
    assert capture.shared_signs._kept is not None
    capture.take()
    assert capture.shared_signs._kept is None


def test_signs_that_are_no_longer_needed_are_freed_before_others_are_drawn(monkeypatch):
    shared, alive = SharedSigns(), []
    original = SignFactor.matrix

    def matrix(self, rank, width, **ranges):
        alive.append(first is not None and first() is not None)
        return original(self, rank, width, **ranges)

    monkeypatch.setattr(SignFactor, "matrix", matrix)
    first, like = None, torch.zeros(0)
    first = weakref.ref(shared.matrix(SignFactor(3, 0, "block", "out"), 4, 6, (0, 6), like))
    assert first() is not None
    assert shared.matrix(SignFactor(3, 0, "block", "out"), 4, 6, (0, 6), like) is first()
    assert shared.matrix(SignFactor(3, 1, "block", "out"), 4, 6, (2, 5), like).shape == (3, 4)
    assert alive == [False, False]
