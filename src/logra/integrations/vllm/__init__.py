"""vLLM as a rollout engine that applies the few bytes of a policy update in place, bit for bit.

Inside the engine: a plugin (`plugin.register`, entry point group `vllm.general_plugins`) adds the weight-transfer backend
`logra`; `WorkerExtension` is the route for engines without such backends. Both drive a `Session`, which holds a
`logra.sync.Replica` whose pieces are the engine's own weights.

Outside: `VLLMEngine` for a `vllm.LLM` of this process, `VLLMServer` for `vllm serve` elsewhere. vLLM is imported by what
runs inside it and by nothing else here. docs/vllm.md has the flags, the guarantees and the limits.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logra.integrations.vllm.client import EngineClient
    from logra.integrations.vllm.engine import VLLMEngine, engine_options
    from logra.integrations.vllm.server import VLLMServer
    from logra.integrations.vllm.worker_extension import WorkerExtension

__all__ = ["EngineClient", "VLLMEngine", "VLLMServer", "WorkerExtension", "engine_options"]

_HOMES = {
    "EngineClient": "client",
    "VLLMEngine": "engine",
    "VLLMServer": "server",
    "WorkerExtension": "worker_extension",
    "engine_options": "engine",
}


def __getattr__(name: str) -> Any:
    # vLLM imports this package in each of its processes, also where nothing of it is used.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
