"""`WorkerExtension`: the route into an engine through `LLM.collective_rpc`, for vLLM without weight-transfer backends.

    llm = vllm.LLM(model, worker_extension_cls="logra.integrations.vllm.WorkerExtension")

The methods mirror those of a weight-transfer backend. vLLM makes this class a base of its workers; nobody else needs it.
"""

from typing import Any

from logra.integrations.vllm.messages import InitInfo, UpdateInfo, telling_errors
from logra.integrations.vllm.session import Session
from logra.integrations.vllm.sleep import SESSION, session_of, watch_sleep
from logra.integrations.vllm.workers import workers_of


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    model_runner: Any
    vllm_config: Any

    def logra_init(self, init_info: dict[str, Any]) -> None:
        """Join a run."""
        with telling_errors():
            _session(self).join(InitInfo(**init_info))

    def logra_update(self, update_info: dict[str, Any]) -> None:
        """Apply a packet or a part of an anchor; on return the weights are written."""
        with telling_errors():
            _session(self).receive(UpdateInfo(**update_info))

    def logra_state(self) -> dict[str, Any]:
        """Run, version and soundness, see `Session.state`."""
        with telling_errors():
            return _session(self).state()


def _session(worker: Any) -> Session:
    """The session of a worker, begun with the first call."""
    session = session_of(worker)
    if session is None:
        session = Session(worker.model_runner.get_model(), workers_of(worker.vllm_config))
        setattr(worker, SESSION, session)
        watch_sleep()
    return session
