"""What `SketchOptimizer` is built from: its arguments checked, its parameter groups, and what is sketched of each target."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from logra.errors import ConfigError
from logra.optim import state
from logra.optim.config import Config
from logra.sketch.capture import SketchSpec
from logra.sketch.targets import Target

WEIGHT_DTYPES = {"fp32": torch.float32, "split32": torch.bfloat16, "split24": torch.bfloat16}
"""Dtype that the model's weights must have, by `Config.weight_storage`."""


def resolve_config(model: Any, config: Config | None, settings: dict[str, Any]) -> Config:
    """The config that the arguments of `SketchOptimizer` describe.

    Raises:
        ConfigError: both a config and settings, or something else than a module and a config.
    """
    if config is not None and settings:
        raise ConfigError(f"give either a Config or settings, not both (got {', '.join(settings)} besides the Config)")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give the nn.Module itself, not its parameters")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config is a {type(config).__name__}: give a logra.Config, or settings as keyword arguments")
    return config or Config.from_settings(settings)


def check_dtypes(config: Config, targets: Sequence[Target]) -> None:
    """Refuse weights of another dtype than the weight storage needs.

    Raises:
        ConfigError: with the name of the first such weight.
    """
    expected = WEIGHT_DTYPES[config.weight_storage]
    for target in targets:
        if target.parameter.dtype != expected:
            raise ConfigError(
                f"weight_storage={config.weight_storage!r} needs {expected} weights, but {target.fqn!r} is "
                f"{target.parameter.dtype}. Load the model in {expected}, or use weight_storage='split32' or "
                f"'split24' for bfloat16 and 'fp32' for float32 weights."
            )


def parameter_groups(
    config: Config, targets: Sequence[Target], dense: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The targets, with what a saved state must agree with; then the parameters of the inner AdamW, if there are any."""
    groups: list[dict[str, Any]] = [
        {
            "params": [target.parameter for target in targets],
            "lr": config.lr,
            "fqns": [target.fqn for target in targets],
            "shapes": [list(target.parameter.shape) for target in targets],
            "settings": state.binding_settings(config),
            "version": 0,
            "num_skipped": 0,
            "coherence": [0, 0.0],
        }
    ]
    if dense:
        groups.append(
            {
                "params": list(dense.values()),
                "lr": config.non_target_lr,
                "fqns": list(dense),
                "shapes": [list(parameter.shape) for parameter in dense.values()],
            }
        )
    return groups


def sketch_spec(config: Config) -> SketchSpec:
    """What is sketched of every target."""
    return SketchSpec(
        rank=config.rank,
        two_sided=config.sketch == "two_sided",
        seed=config.seed,
        input_moments=config.input_scaling,
    )


def out_side(config: Config, targets: Sequence[Target]) -> frozenset[str]:
    """Names of the targets whose one-sided sketch is B G."""
    return frozenset(
        target.fqn
        for target in targets
        if config.side == "out" or (config.side == "auto" and target.in_features < target.out_features)
    )
