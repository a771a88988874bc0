"""What vLLM calls in each of its processes: makes the backend `logra` known, and does nothing else until it is used.

Contract: costs no import that vLLM does not need itself, and never raises: an engine that does not use `logra` runs as if
it were not installed. An engine that asks for the backend on a vLLM that has none is told so by vLLM, by name.
"""

import inspect
import logging
from typing import Any

logger = logging.getLogger("logra")

BACKEND = "logra"
EXTENSION = "logra.integrations.vllm.WorkerExtension"
EXTENSIONS = (EXTENSION, "logra.integrations.vllm.worker_extension.WorkerExtension")
_ENGINE_PARAMETERS = {"config", "vllm_config", "device", "model"}


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; may be called any number of times."""
    try:
        _register_backend()
        from logra.integrations.vllm import plain_linear

        plain_linear.install()
    except Exception as error:  # whatever a vLLM of another version does: it must start without us
        logger.warning("logra's vLLM plugin is not available in this vLLM: %s", error)


def backend_factory() -> Any:
    """vLLM's registry of weight-transfer backends; None where it has none, or where they do not get the model."""
    try:
        from vllm.distributed.weight_transfer import factory  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    engines = factory.WeightTransferEngineFactory
    gets_model = _ENGINE_PARAMETERS.issubset(inspect.signature(engines.create_engine).parameters)
    return engines if gets_model else None


def _register_backend() -> None:
    engines = backend_factory()
    if engines is None:
        return  # the worker extension is the route into this vLLM
    try:
        engines.register_engine(BACKEND, "logra.integrations.vllm.transfer_engine", "LograTransferEngine")
    except ValueError:
        return  # registered before
