"""Trainable parameters that are not targets: frozen, or trained by an inner torch.optim.AdamW on dense gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from logra.errors import ConfigError
from logra.optim.config import Config
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
        sketched = {id(target.parameter) for target in targets}
        others = {
            canonical_fqn(name): parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in sketched and parameter.requires_grad
        }
        self.parameters: dict[str, nn.Parameter] = {}
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
        self.parameters = others
        self.adamw = torch.optim.AdamW(others.values(), lr=config.non_target_lr, weight_decay=config.weight_decay)

    def gradients(self) -> dict[str, Tensor]:
        """Dense gradients of this window by fully qualified name."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def step(self, lr: float) -> dict[str, Tensor]:
        """One AdamW step; returns copies of the parameters that changed."""
        if self.adamw is None:
            return {}
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        return {name: self.parameters[name].detach().clone() for name in self.gradients()}
