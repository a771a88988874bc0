"""Experts of a mixture as linear maps of their own.

transformers keeps the weights of all experts of a layer in 3-D parameters [num_experts, out, in] and multiplies with them
in kernels that know no modules. Here every expert becomes a module, `Expert`, whose weight is a view of its slice; what
works on linear modules (capture, injection of a proposed change) then works on experts. `route` lets an experts module
call them, one expert after the other, as transformers' own "eager" implementation does:

    y[t] = Σ over the experts e of token t of  p[t, e] · down_e(gate(up_e(x[t])))

The slice e of the parameter `layers.0.mlp.experts.down_proj` is the weight `layers.0.mlp.experts.down_proj[e]`. An expert
that no token is sent to does not run.

Refuses (TargetError): weights of modules that are no such experts, with biases, stored transposed, spread over processes.
"""

import re
import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logra.errors import CaptureError, TargetError
from logra.shards import is_sharded

_ROUTED = "_logra_experts"
_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class Expert(nn.Linear):
    """One expert's linear map. It is no submodule of the model.

    Args:
        owner: the experts module.
        name: of its 3-D parameter.
        index: of the expert.
    """

    def __init__(self, owner: nn.Module, name: str, index: int) -> None:
        weight = owner.get_parameter(name)
        super().__init__(weight.shape[2], weight.shape[1], bias=False, device="meta")
        self.weight = nn.Parameter(weight.data[index])
        self.place = (owner, name, index)  # in a tuple: a module would be registered as a part of this one

    @property
    def owner(self) -> nn.Module:
        """The experts module of the model."""
        return self.place[0]

    @property
    def stored(self) -> nn.Parameter:
        """The 3-D parameter of the model."""
        owner, name, _ = self.place
        return owner.get_parameter(name)

    def check(self) -> None:
        """Raise CaptureError if the model's parameter is no longer the one that this is a view of."""
        _, name, index = self.place
        with torch._C.DisableTorchFunction():  # a mode that casts would compare copies
            is_same = self.stored.data[index].data_ptr() == self.weight.data_ptr()
        if not is_same:
            raise CaptureError(
                f"the experts' {name!r} is not the parameter that the optimizer was built on (moved to a device, or "
                f"load_state_dict(assign=True)). Build the optimizer after loading and moving."
            )


def fused_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The 3-D parameters [num_experts, out, in] of an experts module of transformers; none for any other module."""
    if not all(hasattr(module, flag) for flag in _FLAGS) or module.is_transposed:
        return {}
    return {name: weight for name, weight in module.named_parameters(recurse=False) if name in _WEIGHTS}


def slice_name(fqn: str, index: int) -> str:
    """The canonical name of one expert's weight."""
    return f"{fqn}[{index}]"


def stored_name(name: str) -> str:
    """The name of the parameter that holds a canonical weight: without what `slice_name` adds."""
    return re.sub(r"\[\d+\]$", "", name)


def experts_of(fqn: str, owner: nn.Module, name: str) -> Iterator[Expert]:
    """The modules of all experts of a 3-D parameter.

    Args:
        fqn: of the parameter, for errors.
        owner: the module that has it.
        name: of the parameter in the module.

    Raises:
        TargetError: see the module docstring.
    """
    weight = owner.get_parameter(name)
    kind = type(owner).__name__
    if name not in fused_weights(owner):
        raise TargetError(
            f"target_modules matches fused expert weights ({fqn!r}, a 3-D parameter of {kind}), which cannot be sketched: "
            f"only transformers' experts [num_experts, out, in] can. Name the modules around them, for example "
            f"('self_attn.q_proj', 'self_attn.o_proj')."
        )
    if owner.has_bias or owner.has_post_expert_norm or owner._is_expert_parallel or is_sharded(weight):
        raise TargetError(
            f"target {fqn!r}: experts with biases, norms of their own, or spread over processes cannot be sketched. Leave "
            f"them out of target_modules."
        )
    if "forward" in owner.__dict__ and _ROUTED not in owner.__dict__:
        raise TargetError(f"target {fqn!r}: the forward of its {kind} was replaced (offloading hooks, for example).")
    for index in range(weight.shape[0]):
        yield Expert(owner, name, index)


class _Routed:
    """What the forward of an experts module needs. A copied or pickled module gets None in its place: it is plain again."""

    def __init__(self) -> None:
        self.experts: dict[str, list[Expert]] = {}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def route(experts: list[Expert]) -> None:
    """Let the owners call these experts."""
    for expert in experts:
        owner, name, _ = expert.place
        routed = owner.__dict__.get(_ROUTED)
        if routed is None:
            routed = owner.__dict__[_ROUTED] = _Routed()
            owner.forward = types.MethodType(forward, owner)
        routed.experts.setdefault(name, []).append(expert)


def unroute(experts: list[Expert]) -> None:
    """Give the owners their own forward back."""
    for expert in experts:
        owner, _, _ = expert.place
        if owner.__dict__.pop(_ROUTED, None) is not None:
            del owner.forward


def routed_experts(module: nn.Module) -> list[Expert]:
    """The experts that a module calls after `route`."""
    routed = module.__dict__.get(_ROUTED)
    return [] if routed is None else [expert for experts in routed.experts.values() for expert in experts]


@torch.compiler.disable
def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module: hidden_states [t, hidden], top_k_index and top_k_weights [t, k] -> [t, hidden]."""
    # Named `forward`, so that copies and pickles of the module resolve to a forward of their own.
    routed: _Routed | None = self.__dict__.get(_ROUTED)
    if routed is None:
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    for experts in routed.experts.values():
        experts[0].check()
    output = torch.zeros_like(hidden_states)
    for index in top_k_index.unique().tolist():
        tokens, places = torch.where(top_k_index == index)
        up = _linear(self, routed, "gate_up_proj" if self.has_gate else "up_proj", index, hidden_states[tokens])
        inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)  # type: ignore[operator]
        down = _linear(self, routed, "down_proj", index, inner)
        output.index_add_(0, tokens, (down * top_k_weights[tokens, places, None]).to(output.dtype))
    return output


def _linear(owner: nn.Module, routed: _Routed, name: str, index: int, x: Tensor) -> Tensor:
    if name in routed.experts:
        return routed.experts[name][index](x)
    return F.linear(x, getattr(owner, name)[index])  # what the attribute is now: a probe may have replaced it
