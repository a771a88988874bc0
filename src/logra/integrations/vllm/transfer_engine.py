"""vLLM's weight-transfer backend `logra`: the route for `vllm serve --weight-transfer-config '{"backend": "logra"}'`.

vLLM creates one per worker after the model is loaded, and drives it through its endpoints:

    /init_weight_transfer_engine   init_info:   join a run
    /start_weight_update           nothing to prepare: updates are applied in place
    /update_weights                update_info: a packet, or a part of an anchor
    /finish_weight_update          nothing to finish; vLLM takes over the name of the new version

Only vLLM imports this module.
"""

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine  # pyright: ignore[reportMissingImports]

from logra.integrations.vllm.messages import InitInfo, UpdateInfo, telling_errors
from logra.integrations.vllm.session import Session
from logra.integrations.vllm.sleep import watch_sleep
from logra.integrations.vllm.workers import workers_of


class LograTransferEngine(WeightTransferEngine):
    """A `Session` behind vLLM's interface."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.session = Session(model, workers_of(vllm_config))
        watch_sleep()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a run."""
        with telling_errors():
            self.session.join(init_info)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Apply a packet or a part of an anchor; on return the weights are written."""
        with telling_errors():
            self.session.receive(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """The same for a parsed message."""
        with telling_errors():
            self.session.receive(update_info)

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        """Nothing to release."""
