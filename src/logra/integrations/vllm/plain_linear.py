"""Keeps linear weights in their parameters on CPU builds of vLLM, where they would be packed out of reach.

vLLM's CPU build hands every unquantised linear weight to oneDNN, which keeps a packed copy, and empties the parameter: an
update in place has nothing to write to. For engines that follow updates the packing is replaced by oneDNN's product with
the parameter as it lies in memory. Other engines, and other platforms, are left alone.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor

from logra.integrations.vllm.plugin import BACKEND, EXTENSIONS

_MARK = "_logra_plain"
_KERNELS = "vllm.model_executor.layers.utils"


def install() -> None:
    """Replace vLLM's choice of a CPU kernel by one that leaves the weights of following engines where they are.

    The module that chooses takes seconds to import, and processes without a model never do: where it is not loaded yet,
    the choice is replaced when it is.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu():
        when_imported(_KERNELS, _replace)


def _replace(kernels: Any) -> None:
    if not hasattr(kernels.dispatch_cpu_unquantized_gemm, _MARK):
        kernels.dispatch_cpu_unquantized_gemm = choosing(kernels.dispatch_cpu_unquantized_gemm, _loading_follower)


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then(module)` once a module is imported; at once if it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds one module, with a loader that calls back after it has run."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, with its loader wrapped."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute: Callable[[Any], None] = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module
        return spec


def choosing(original: Callable[[Any, bool], None], is_follower: Callable[[], bool]) -> Callable[[Any, bool], None]:
    """The dispatch that packs as `original` does unless `is_follower()` and the layer is a plain matrix."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2 or not is_follower():
            original(layer, remove_weight)
            return
        layer.cpu_linear = linear

    setattr(dispatch, _MARK, True)
    return dispatch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias from the weight as it lies in memory.

    oneDNN's kernel where torch has it: with few rows it is two to three times as fast as torch's own, and as fast as
    the packed one.
    """
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


def is_follower(vllm_config: Any) -> bool:
    """Whether the engine of this configuration follows updates of logra."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return (
        getattr(transfer, "backend", None) == BACKEND or vllm_config.parallel_config.worker_extension_cls in EXTENSIONS
    )


def _loading_follower() -> bool:
    from vllm.config import get_current_vllm_config_or_none  # pyright: ignore[reportMissingImports]

    vllm_config = get_current_vllm_config_or_none()
    return vllm_config is not None and is_follower(vllm_config)
