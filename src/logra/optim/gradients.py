"""From the capture's sketches to one recovered gradient a target: reduce, check, recover, norm."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from logra import distributed
from logra.errors import CaptureError
from logra.optim.exchange import for_each, numbers_of_all
from logra.optim.layer import LayerGradient, gradient_one_sided, gradient_two_sided
from logra.optim.norms import norm64
from logra.shards import is_sharded
from logra.sketch.capture import Capture, Sketch
from logra.sketch.targets import Target


def recover_own(
    capture: Capture, targets: Sequence[Target], owner_of: Mapping[str, int]
) -> tuple[dict[str, Tensor], dict[str, LayerGradient]]:
    """Average the sketches over processes, each on its owner alone, and recover the gradients of this process's targets.

    Args:
        capture: with the sketches of the window; it is emptied.
        targets: all of the optimizer.
        owner_of: process by fully qualified name.

    Returns:
        Norms of the gradients of all targets that ran backward on any process, fp32 scalars, the same bits on all
        processes; and those gradients of them that this process owns.

    Raises:
        CaptureError: nothing was captured, or a dense gradient reached a target past its sketch; on all processes.
    """
    present = {fqn: bool(sketch.tensors()) for fqn, sketch in capture.sketches().items()}
    dense = [target.stored.grad is not None for target in targets]
    # One collective tells every process what ran anywhere: a target that ran on none is left alone, one that ran on some
    # has a zero gradient on the others.
    flags = distributed.any_process([*dense, *(present[target.fqn] for target in targets)])
    dense, ran = flags[: len(targets)], flags[len(targets) :]
    if any(dense):
        raise CaptureError(
            f"target {targets[dense.index(True)].fqn!r} has a dense gradient: something used its weight past the module's "
            f"forward (functional_call, a fused kernel, a regulariser on the weight). Leave it out of target_modules."
        )
    if not any(ran):
        raise CaptureError(
            "no gradient was captured since the last step(): call loss.backward() on a loss of this model, computed with "
            "gradients enabled and through the targets' own forward"
        )
    moving = [target for target, did_run in zip(targets, ran, strict=True) if did_run]
    sketches = capture.take()
    own: dict[str, Target] = {}
    for owner in range(distributed.num_processes()):
        theirs = [target for target in moving if owner_of[target.fqn] == owner]
        for target in theirs:
            sketches[target.fqn] = capture.whole(target.fqn, sketches[target.fqn])
        addends = [(tensor, target) for target in theirs for tensor in sketches[target.fqn].tensors()]
        distributed.average_(
            [tensor for tensor, _ in addends], [target.sharding.num_users for _, target in addends], owner=owner
        )
        del addends
        if owner == distributed.rank():
            own = {target.fqn: target for target in theirs}
        else:
            for target in theirs:
                del sketches[target.fqn]
    # Each sketch is dropped as soon as its gradient is recovered.
    recovered = for_each(list(own), lambda fqn: _recover(capture, own[fqn], sketches.pop(fqn)), "recover")
    names = [target.fqn for target in moving]
    norms = numbers_of_all(
        {fqn: gradient.norm for fqn, gradient in recovered.items()}, names, moving[0].parameter.device
    )
    return dict(zip(names, norms.unbind(), strict=True)), recovered


def average_dense(parameters: Mapping[str, nn.Parameter]) -> None:
    """Average `.grad` over processes; one that is missing here and not everywhere counts as zero.

    Those of DTensors are left alone: FSDP2 has averaged them, and tensor parallelism alone has one replica.
    """
    plain = [parameter for parameter in parameters.values() if not is_sharded(parameter)]
    if distributed.num_processes() == 1 or not plain:
        return
    present = distributed.any_process([parameter.grad is not None for parameter in plain])
    moving = [parameter for parameter, has_grad in zip(plain, present, strict=True) if has_grad]
    for parameter in moving:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    distributed.average_([parameter.grad for parameter in moving if parameter.grad is not None])


def _recover(capture: Capture, target: Target, sketch: Sketch) -> LayerGradient:
    exponents = capture.exponents(target.fqn)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in sketch.tensors()):
        # Decompositions of such a matrix raise or hang on some devices; the norm alone tells that it must be skipped.
        return LayerGradient(norm=torch.full((), float("nan"), device=target.parameter.device))
    if sketch.on_in is not None and sketch.on_out is not None:
        return gradient_two_sided(sketch.on_in, sketch.on_out, capture.out_signs(target.fqn), exponents)
    if sketch.on_in is not None:
        return gradient_one_sided(sketch.on_in, capture.in_signs(target.fqn), target.in_features, exponents)
    assert sketch.on_out is not None
    return gradient_one_sided(sketch.on_out, capture.out_signs(target.fqn), target.out_features, exponents)


def total_norm(norms: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> Tensor:
    """Frobenius norm over recovered and dense gradients, fp32 scalar; not finite if one of them is not.

    Args:
        norms: of the recovered gradients.
        dense: the others.
    """
    every = [*norms.values(), *(_norm(grad) for grad in dense.values())]
    stacked = torch.stack([norm.to(every[0].device) for norm in every])
    # Whether to skip and how much to clip is decided by this number: to the bit the same one everywhere.
    return distributed.broadcast_(torch.linalg.vector_norm(stacked, dtype=torch.float64).float(), source=0)


def non_finite(norms: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients that are not finite."""
    every = {**norms, **{fqn: _norm(grad) for fqn, grad in dense.items()}}
    return [fqn for fqn, norm in every.items() if not torch.isfinite(norm)] or ["the norm over all layers"]


def _norm(grad: Tensor) -> Tensor:
    """Frobenius norm of a dense gradient, over all of its shards, fp32 scalar."""
    if is_sharded(grad):
        norm: Any = torch.linalg.vector_norm(grad, dtype=torch.float64)
        return norm.full_tensor().float()
    return norm64(grad).float()
