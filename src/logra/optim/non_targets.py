"""Trainable parameters that are not targets: frozen, or trained by an inner torch.optim.AdamW on dense gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra.distributed import num_processes
from logra.errors import ConfigError
from logra.optim.config import Config
from logra.shards import is_sharded, whole
from logra.sketch.experts import fused_weights, slice_name
from logra.sketch.targets import Target, canonical_fqn


class NonTargets:
    """Splits them off a model and steps them.

    Args:
        model: the model; its non-targets are frozen here if `config.non_target` says so.
        targets: the sketched weights.
        config: settings.

    Raises:
        ConfigError: an inner AdamW is asked for and there is nothing for it to train.
    """

    def __init__(self, model: nn.Module, targets: Sequence[Target], config: Config) -> None:
        sketched = {id(target.stored) for target in targets}
        others = {
            canonical_fqn(name): parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in sketched and parameter.requires_grad
        }
        self.parameters: dict[str, nn.Parameter] = {}
        self._fused = {
            f"{canonical_fqn(name)}.{own}" for name, module in model.named_modules() for own in fused_weights(module)
        }
        self.adamw: torch.optim.AdamW | None = None
        self.frozen: list[nn.Parameter] = []
        if config.non_target == "freeze":
            self.frozen = list(others.values())
            for parameter in self.frozen:
                parameter.requires_grad_(False)
            return
        if not others:
            raise ConfigError("non_target='adamw', but every trainable parameter is a target: use non_target='freeze'")
        for name, parameter in others.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"non_target='adamw' needs float32 parameters, but {name!r} is {parameter.dtype}, in which small steps "
                    f"would be lost. Use non_target='freeze', or load the model in float32."
                )
            if config.trust is not None and is_sharded(parameter):
                raise ConfigError(
                    f"non_target='adamw' with a trust region: the step of the shard {name!r} cannot be priced. Use "
                    f"non_target='freeze', or trust=None."
                )
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.size() != num_processes():
                raise ConfigError(
                    f"non_target='adamw': the shards of {name!r} are spread over {mesh.size()} of {num_processes()} "
                    f"processes, and nobody averages their gradients over the rest. Use non_target='freeze', or FSDP2 over "
                    f"all processes."
                )
        self.parameters = others
        self.adamw = torch.optim.AdamW(others.values(), lr=config.non_target_lr, weight_decay=config.weight_decay)

    def gradients(self) -> dict[str, Tensor]:
        """Dense gradients of this window by fully qualified name."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def step(self, lr: float) -> dict[str, Tensor]:
        """One AdamW step; returns copies of the parameters that changed, whole on every process (shards: on the CPU)."""
        if self.adamw is None:
            return {}
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        return self._changed()

    def propose(self, lr: float, shrink: float | Tensor | None) -> "DenseProposal":
        """The AdamW step, computed on copies: what it would subtract, and the moments it would leave.

        Args:
            lr: learning rate.
            shrink: what clipping multiplies the gradients by; None leaves them.
        """
        gradients = self.gradients()
        if self.adamw is None or not gradients:
            return DenseProposal({}, {})
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for name, grad in gradients.items():
            copies[self.parameters[name]] = copy = nn.Parameter(self.parameters[name].detach().clone())
            copy.grad = grad if shrink is None else grad * shrink
        trial = torch.optim.AdamW(copies.values(), lr=lr, weight_decay=self.adamw.param_groups[0]["weight_decay"])
        for parameter, copy in copies.items():
            trial.state[copy] = {name: value.clone() for name, value in self.adamw.state[parameter].items()}
        trial.step()
        return DenseProposal(
            {parameter: parameter.detach() - copy.detach() for parameter, copy in copies.items()},
            {parameter: trial.state[copy] for parameter, copy in copies.items()},
        )

    @torch.no_grad()
    def commit(self, proposal: "DenseProposal", alpha: float) -> dict[str, Tensor]:
        """Take `alpha` times a proposed step; returns copies of the parameters that changed."""
        for parameter, displacement in proposal.displacements.items():
            parameter.sub_(displacement, alpha=alpha)
        if self.adamw is not None:
            for parameter, state in proposal.state.items():
                self.adamw.state[parameter] = state
        return self._changed()

    def _changed(self) -> dict[str, Tensor]:
        changed = {name: whole(self.parameters[name].detach().clone()) for name in self.gradients()}
        for fqn in self._fused & changed.keys():
            changed |= {slice_name(fqn, index): weight for index, weight in enumerate(changed.pop(fqn))}
        return changed


@dataclass(frozen=True)
class DenseProposal:
    """A step of the inner AdamW that was not taken yet.

    Attributes:
        displacements: parameter -> what a whole step subtracts from it, fp32, of its shape.
        state: parameter -> AdamW's state after the step.
    """

    displacements: dict[nn.Parameter, Tensor]
    state: dict[nn.Parameter, dict[str, Tensor]]
