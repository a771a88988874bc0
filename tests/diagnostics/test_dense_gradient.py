"""The dense gradient beside the sketch is the one that autograd forms without a sketch."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from logra.diagnostics.dense_gradient import DenseGradients
from logra.errors import CaptureError


def watch(opt):
    return DenseGradients({target.fqn: target.module for target in opt.targets})


def shapes(opt):
    return {target.fqn: (target.out_features, target.in_features) for target in opt.targets}


def autograd_gradients(model, rl, batch):
    """From a float64 copy that never saw an optimizer."""
    plain = copy.deepcopy(model).double().requires_grad_(True)
    rl.loss(plain, batch).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("rank", [2, 64])
@pytest.mark.parametrize("sketch", ["one_sided", "two_sided"])
def test_equal_to_autograd_over_micro_batches(tiny_lm, rl, sketch, rank):
    batch = rl.batch()
    expected = autograd_gradients(tiny_lm, rl, batch)
    opt = rl.optimizer(tiny_lm, sketch=sketch, rank=rank, momentum=0.0)
    dense = watch(opt)
    dense.active = True
    for rows in (slice(0, 1), slice(1, 4)):
        rl.loss(tiny_lm, batch, rows).backward()
    found = dense.take(shapes(opt))
    assert found.keys() == {target.fqn for target in opt.targets} and len(found) == 6
    for fqn, gradient in found.items():
        assert gradient.dtype == torch.float32
        # fp32 sums over 28 tokens, against float64.
        assert (gradient - expected[fqn]).norm() < 1e-5 * expected[fqn].norm()
    assert dense.take(shapes(opt)) == {}  # handed over once


def test_only_while_active_and_only_with_gradients(tiny_lm, rl):
    batch = rl.batch()
    opt = rl.optimizer(tiny_lm)
    dense = watch(opt)
    rl.loss(tiny_lm, batch).backward()
    assert dense.take(shapes(opt)) == {}
    dense.active = True
    with torch.no_grad():
        tiny_lm(batch["input_ids"])
    assert dense.take(shapes(opt)) == {}
    dense.remove()
    dense.active = True
    rl.loss(tiny_lm, batch).backward()
    assert dense.take(shapes(opt)) == {}
    assert all(not target.module._forward_hooks for target in opt.targets)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_counts_once(tiny_lm, rl, use_reentrant):
    """Activation checkpointing runs the forward of a layer twice and its backward once."""
    batch = rl.batch()
    expected = autograd_gradients(tiny_lm, rl, batch)
    opt = rl.optimizer(tiny_lm)
    dense = watch(opt)
    dense.active = True
    layer = tiny_lm.layers[1]
    plain = layer.forward
    layer.forward = lambda x: checkpoint(plain, x, use_reentrant=use_reentrant)
    rl.loss(tiny_lm, batch).backward()
    for fqn, gradient in dense.take(shapes(opt)).items():
        assert (gradient - expected[fqn]).norm() < 1e-5 * expected[fqn].norm()


def test_bfloat16_layers_are_summed_in_fp32(tiny_lm, rl):
    """The products are those of the bf16 inputs, added up without rounding: one GEMM in bf16 would be off by 1e-3."""
    tiny_lm.bfloat16()
    opt = rl.optimizer(tiny_lm, weight_storage="split32")
    target = opt.targets[0]
    dense = DenseGradients({target.fqn: target.module})
    dense.active = True
    seen = []

    def watch_output(module, args, output):
        output.register_hook(lambda h: seen.append((args[0].detach(), h.detach())))

    target.module.register_forward_hook(watch_output)
    rl.loss(tiny_lm, rl.batch()).backward()
    ((x, h),) = seen
    expected = h.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    gradient = dense.take(shapes(opt))[target.fqn]
    assert (gradient - expected).norm() < 1e-6 * expected.norm()


def test_an_input_changed_in_place_is_refused(tiny_lm, rl):
    opt = rl.optimizer(tiny_lm, sketch="one_sided", momentum=0.0)
    dense = watch(opt)
    dense.active = True
    x = torch.ones(1, 40)
    output = opt.targets[0].module(x)
    x.mul_(2)
    with pytest.raises(CaptureError, match=r"layers.0.q_proj.weight.*changed in place"):
        output.sum().backward()


def test_copies_of_the_model_are_not_watched(tiny_lm, rl):
    opt = rl.optimizer(tiny_lm)
    dense = watch(opt)
    dense.active = True
    other = copy.deepcopy(tiny_lm).requires_grad_(True)
    rl.loss(other, rl.batch()).backward()
    assert dense.take(shapes(opt)) == {}
