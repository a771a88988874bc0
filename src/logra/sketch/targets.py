"""Which weights are sketched.

A pattern names a module by the tail of its fully qualified name (`q_proj`, `self_attn.q_proj`, `layers.*.down_proj`, shell
wildcards allowed) and matches `nn.Linear` and transformers' `Conv1D`. It also names the fused weights of experts
(`experts.gate_up_proj`, `down_proj`), of which every expert's slice is a target. Whatever a pattern matches is either
sketched or refused by name; nothing is skipped in silence.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from logra.errors import TargetError
from logra.shards import Sharding, local, reshard, shardings
from logra.sketch.experts import Expert, experts_of, slice_name

ALL_LINEAR = "all-linear"
"""In place of patterns: every linear module except the output embedding."""

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_OUTPUT_EMBEDDINGS = ("lm_head", "embed_out", "output_layer")


@dataclass(frozen=True, eq=False)
class Target:
    """One sketched weight. The canonical weight is [out, in], also where the module stores its transpose.

    Attributes:
        fqn: fully qualified name of the weight, without wrapper segments.
        parent: fully qualified name of the parent module; names the projections, so siblings of one width share them.
        module: the module that owns the weight; of an expert the `Expert`.
        transposed: the module stores [in, out] (GPT-2's `Conv1D`).
        parameter: the weight as the module stores it; under FSDP2 the sharded DTensor, also while it is gathered; of an
            expert a view of its slice.
        sharding: which part of the weight this process holds, and which it computes with.
    """

    fqn: str
    parent: str
    module: nn.Module
    transposed: bool
    parameter: nn.Parameter
    sharding: Sharding

    @property
    def stored(self) -> nn.Parameter:
        """The parameter of the model that holds the weight: `parameter`, or that of all experts of a layer."""
        return self.module.stored if isinstance(self.module, Expert) else self.parameter

    @property
    def weight(self) -> Tensor:
        """What this process holds of the canonical weight, [held rows, held columns]: a detached view of the parameter."""
        weight = local(self.parameter)
        return weight.T if self.transposed else weight

    @property
    def out_features(self) -> int:
        """Number of rows of the canonical weight."""
        return self.parameter.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        """Number of columns of the canonical weight."""
        return self.parameter.shape[0 if self.transposed else 1]


def canonical_fqn(name: str) -> str:
    """The name without the segments that compile, checkpoint and FSDP wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPER_SEGMENTS)


def find_targets(model: nn.Module, patterns: str | Sequence[str]) -> tuple[Target, ...]:
    """The weights that `patterns` select, in the order of `model.named_modules()`, experts last; frozen ones are left out.

    Args:
        model: any module tree; not compiled yet.
        patterns: one or several name patterns (see the module docstring), or "all-linear".

    Raises:
        TargetError: a pattern matches nothing or something that cannot be sketched (another module type, experts that
            `logra.sketch.experts` refuses, a tied, quantised or flattened weight, a peft adapter), everything it matches is
            frozen, or the model is compiled; a shard that `logra.shards` refuses.
    """
    _refuse_compiled(model)
    reshard(model)
    modules = {canonical_fqn(name): module for name, module in model.named_modules()}
    selected = _select(model, modules, patterns)
    experts = _select_experts(model, patterns)
    owners = _owners_by_parameter(model)
    chosen: dict[str, tuple[str, nn.Module]] = {}
    frozen = []
    for name, module in selected.items():
        _check_weight(name, module)
        if not module.weight.requires_grad:  # type: ignore[union-attr]
            frozen.append(name)
            continue
        fqn = f"{name}.weight" if name else "weight"
        aliases = [other for other in owners[id(module.weight)] if other != fqn]
        if aliases:
            raise TargetError(
                f"target {fqn!r} is tied to {', '.join(map(repr, aliases))}: a tied weight has two gradients and one of "
                f"them is not sketched. Leave it out of target_modules, or untie it before building the optimizer."
            )
        chosen[fqn] = (name.rpartition(".")[0], module)
    for name, module in experts.items():
        _check_dtype(name, module.weight)
        if module.stored.requires_grad:
            chosen[name] = (name, module)
        else:
            frozen.append(name)
    if not chosen:
        raise TargetError(
            f"target_modules matches {len(frozen)} modules ({frozen[0]!r}, ...), but all of them are frozen "
            f"(requires_grad=False): unfreeze what is to be trained before building the optimizer"
        )
    parameters: dict[str, Any] = {fqn: (module.weight, _is_conv1d(module)) for fqn, (_, module) in chosen.items()}
    shares = shardings(model, parameters)
    return tuple(
        Target(fqn, parent, module, parameters[fqn][1], parameters[fqn][0], shares[fqn])
        for fqn, (parent, module) in chosen.items()
    )


def _select(model: nn.Module, modules: dict[str, nn.Module], patterns: str | Sequence[str]) -> dict[str, nn.Module]:
    linear_names = [name for name, module in modules.items() if _is_linear(module)]
    if patterns == ALL_LINEAR:
        names = [name for name in linear_names if name.rpartition(".")[2] not in _OUTPUT_EMBEDDINGS]
        if not names:
            raise TargetError(
                f"target_modules='all-linear' matches nothing: {type(model).__name__} has no linear module"
            )
        return {name: modules[name] for name in names}
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not patterns:
        raise TargetError("target_modules is empty: give name patterns such as 'q_proj', or 'all-linear'")
    selected: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = [name for name in modules if name and _matches(name, pattern)]
        if not matches and not _fused_experts(model, (pattern,)):
            fused = _fused_experts(model, ("*",))
            tails = sorted({name.rpartition(".")[2] for name in (*linear_names, *fused)})
            raise TargetError(
                f"target_modules: pattern {pattern!r} matches no module of {type(model).__name__}. "
                f"Its linear modules end in: {', '.join(tails) if tails else '(none)'}; 'all-linear' takes them all."
            )
        selected.update((name, modules[name]) for name in matches)
    return {name: modules[name] for name in modules if name in selected}


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _is_conv1d(module: nn.Module) -> bool:
    # transformers' Conv1D by name: the core does not import transformers. FSDP2 derives a class of its own from a module's.
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _check_dtype(name: str, weight: Tensor) -> None:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TargetError(
            f"target {name!r} has dtype {weight.dtype} (quantised or half precision): load the model in float32 or bfloat16"
        )
    if weight.device.type == "meta":
        raise TargetError(f"target {name!r} is on the meta device: load the weights before building the optimizer")


def _check_weight(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if hasattr(module, "base_layer"):
        raise TargetError(f"target {name!r} carries a peft adapter ({kind}): merge or remove it first")
    if not _is_linear(module):
        raise TargetError(
            f"target {name!r} is a {kind}: only nn.Linear and Conv1D can be sketched. Narrow the pattern in target_modules."
        )
    # The capture replaces the forward: one that does more than the linear map would compute something else in training.
    own_forward = "forward" in module.__dict__ and "_logra_slot" not in module.__dict__
    if own_forward or (isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward):
        raise TargetError(
            f"target {name!r} ({kind}) has a forward of its own: only the plain linear map can be sketched. Leave it out of "
            f"target_modules, or remove what replaced its forward (offloading hooks, for example)."
        )
    weight = module.weight
    if hasattr(weight, "ds_id") or weight.numel() == 0 or weight.ndim == 1:  # type: ignore[union-attr]
        raise TargetError(
            f"target {name!r} has a flattened or emptied weight of shape {tuple(weight.shape)} (DeepSpeed ZeRO or FSDP1): "  # type: ignore[union-attr]
            f"the gradient of a matrix cannot be sketched from it. Train without ZeRO-3 and FSDP1."
        )
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise TargetError(f"target {name!r}: the weight must be a 2-D parameter, it is a {type(weight).__name__}")
    _check_dtype(name, weight)


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise TargetError(
                f"module {name or type(module).__name__!r} is already compiled: build SketchOptimizer first, then call "
                f"torch.compile(model); a graph compiled before has no place for the capture"
            )


def _fused_experts(model: nn.Module, patterns: Sequence[str]) -> dict[str, tuple[nn.Module, str]]:
    """Fully qualified name -> owner, and name there, of the 3-D parameters that look like experts' and match."""
    found = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            fqn = f"{canonical_fqn(module_name)}.{name}".lstrip(".")
            if (
                parameter.ndim == 3
                and not isinstance(module, nn.modules.conv._ConvNd)
                and parameter.shape[0] > 1
                and min(parameter.shape[1:]) > 1
                and any(_matches(fqn, pattern) for pattern in patterns)
            ):
                found[fqn] = (module, name)
    return found


def _select_experts(model: nn.Module, patterns: str | Sequence[str]) -> dict[str, Expert]:
    if patterns == ALL_LINEAR:
        patterns = ("*",)
    fused = _fused_experts(model, (patterns,) if isinstance(patterns, str) else patterns)
    return {
        slice_name(fqn, index): expert
        for fqn, (owner, name) in fused.items()
        for index, expert in enumerate(experts_of(fqn, owner, name))
    }


def _owners_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Names under which distinct modules own a parameter; one module registered twice counts once."""
    names: dict[int, list[str]] = defaultdict(list)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=canonical_fqn(module_name), recurse=False):
            names[id(parameter)].append(name)
    return names
