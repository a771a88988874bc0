"""From the capture's sketches to one recovered gradient a target: reduce, check, recover, norm."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from logra import distributed
from logra.errors import CaptureError
from logra.optim.layer import LayerGradient, gradient_one_sided, gradient_two_sided
from logra.sketch.capture import Capture, Sketch
from logra.sketch.targets import Target


def recover_all(capture: Capture, targets: Sequence[Target]) -> dict[str, LayerGradient]:
    """Average the sketches over processes and recover a gradient for every target that ran backward.

    Raises:
        CaptureError: nothing was captured, or a dense gradient reached a target past its sketch.
    """
    sketches = capture.sketches()
    for target in targets:
        if target.parameter.grad is not None:
            raise CaptureError(
                f"target {target.fqn!r} has a dense gradient: something used its weight past the module's forward "
                f"(functional_call, a fused kernel, a regulariser on the weight). Leave it out of target_modules."
            )
    if not any(sketch.tensors() for sketch in sketches.values()):
        raise CaptureError(
            "no gradient was captured since the last step(): call loss.backward() on a loss of this model, computed with "
            "gradients enabled and through the targets' own forward"
        )
    distributed.average_([tensor for sketch in sketches.values() for tensor in sketch.tensors()])
    return {
        target.fqn: _recover(capture, target, sketches[target.fqn])
        for target in targets
        if sketches[target.fqn].tensors()
    }


def _recover(capture: Capture, target: Target, sketch: Sketch) -> LayerGradient:
    shared = capture.shared_input(target.fqn)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in sketch.tensors()):
        # Decompositions of such a matrix raise or hang on some devices; the norm alone tells that it must be skipped.
        return LayerGradient(norm=torch.full((), float("nan"), device=target.parameter.device))
    if sketch.on_in is not None and sketch.on_out is not None:
        return gradient_two_sided(sketch.on_in, sketch.on_out, capture.out_signs(target.fqn), shared.exponents)
    if sketch.on_in is not None:
        return gradient_one_sided(sketch.on_in, shared.signs(), target.in_features, shared.exponents)
    assert sketch.on_out is not None
    return gradient_one_sided(sketch.on_out, capture.out_signs(target.fqn), target.out_features, shared.exponents)


def total_norm(gradients: Mapping[str, LayerGradient], dense: Mapping[str, Tensor]) -> Tensor:
    """Frobenius norm over recovered and dense gradients, fp32 scalar; not finite if one of them is not."""
    norms = [gradient.norm for gradient in gradients.values()]
    norms += [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in dense.values()]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def non_finite(gradients: Mapping[str, LayerGradient], dense: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients that are not finite."""
    norms = {fqn: gradient.norm for fqn, gradient in gradients.items()}
    norms |= {fqn: torch.linalg.vector_norm(grad, dtype=torch.float32) for fqn, grad in dense.items()}
    return [fqn for fqn, norm in norms.items() if not torch.isfinite(norm)] or ["the norm over all layers"]
