"""`VLLMEngine`: keeps a `vllm.LLM` of this process on the versions of a run.

Two ways lead to its workers, and the engine must have been built with one of them:

    LLM(model, weight_transfer_config={"backend": "logra"})
    LLM(model, worker_extension_cls="logra.integrations.vllm.WorkerExtension")

The first also names the version on every sample (`CompletionOutput.weight_versions`); `engine_options()` chooses it where
the installed vLLM has it.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from logra.errors import ConfigError, LograError, SyncError
from logra.integrations.vllm.client import EngineClient, NoAnswerError, Transport
from logra.integrations.vllm.messages import EngineStorage, LowPlane
from logra.integrations.vllm.plugin import BACKEND, EXTENSION, EXTENSIONS, backend_factory

ALREADY_ACTIVE = "already active"
"""vLLM's words for a round that somebody began and did not finish."""


class VLLMEngine(EngineClient):
    """An in-process engine.

    Args:
        llm: a `vllm.LLM` with one of the two ways above.
        storage: for bf16 engines: "exact" (the default) keeps the low plane, "bf16" does without.
        low_plane: "host" or "device".

    Raises:
        ConfigError: the engine has none of the two ways.

    Example:
        >>> llm = vllm.LLM(model, **engine_options())
        >>> engine = VLLMEngine(llm)
        >>> engine.attach(publisher.log.manifest)
        >>> engine.push(publisher.publish(opt.last_update))
    """

    def __init__(self, llm: Any, *, storage: EngineStorage = "auto", low_plane: LowPlane = "host") -> None:
        super().__init__(storage=storage, low_plane=low_plane)
        self._transport = _transport(llm)

    @property
    def transport(self) -> Transport:
        """The way to the engine."""
        return self._transport


def engine_options() -> dict[str, Any]:
    """Arguments of `vllm.LLM` that make it follow updates, for the vLLM that is installed.

    Raises:
        ConfigError: none is installed.
    """
    require_vllm()
    if backend_factory() is None:
        return {"worker_extension_cls": EXTENSION}
    return {"weight_transfer_config": {"backend": BACKEND}}


def require_vllm() -> None:
    """Say what to do where vLLM is missing.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed. Install it in an environment of its own, since it replaces torch and transformers by its "
            "versions: pip install 'logra[vllm]' there, or `make test-vllm` in a clone (docs/vllm.md). Or sample without it: "
            "rollout.engine=transformers in `logra train`, use_vllm=False in TRL"
        )


def _transport(llm: Any) -> Transport:
    config = llm.llm_engine.vllm_config
    if getattr(getattr(config, "weight_transfer_config", None), "backend", None) == BACKEND:
        return _BackendTransport(llm)
    if config.parallel_config.worker_extension_cls in EXTENSIONS:
        return _ExtensionTransport(llm)
    raise ConfigError(
        f'this LLM was not built to follow updates: add weight_transfer_config={{"backend": "{BACKEND}"}}, or for vLLM '
        f'before 0.28 worker_extension_cls="{EXTENSION}", to LLM(...)'
    )


class _BackendTransport:
    """Over the weight-transfer methods of `LLM`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init(self, info: dict[str, Any]) -> None:
        _asked(self._llm.init_weight_transfer_engine, {"init_info": info})

    def update(self, infos: Iterator[dict[str, Any]], version_name: str) -> None:
        try:
            self._start()
            try:
                for info in infos:
                    _asked(self._llm.update_weights, {"update_info": info})
            except Exception:
                self._close()
                raise
            _asked(self._llm.finish_weight_update, version_name)
        finally:
            _empty_prefix_cache(self._llm)

    def _start(self) -> None:
        try:
            _asked(self._llm.start_weight_update)
        except NoAnswerError as error:
            if ALREADY_ACTIVE not in str(error):
                raise
            self._close()
            _asked(self._llm.start_weight_update)

    def _close(self) -> None:
        """End a round that failed or that somebody left open; it is closed already on workers that raised."""
        with suppress(NoAnswerError):
            _asked(self._llm.finish_weight_update)

    def version_name(self) -> str | None:
        return self._llm.get_weight_version()

    def take_over(self, version_name: str) -> None:
        self._llm.update_weight_version(version_name)
        _empty_prefix_cache(self._llm)


class _ExtensionTransport:
    """Over remote calls to `WorkerExtension`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init(self, info: dict[str, Any]) -> None:
        _asked(self._llm.collective_rpc, "logra_init", args=(info,))

    def update(self, infos: Iterator[dict[str, Any]], version_name: str) -> None:
        try:
            for info in infos:
                _asked(self._llm.collective_rpc, "logra_update", args=(info,))
        finally:
            _empty_prefix_cache(self._llm)

    def version_name(self) -> str | None:
        states = _asked(self._llm.collective_rpc, "logra_state")
        names = {f"{state['run_id']}:{state['version']}" for state in states if state["needs_anchor"] is None}
        return names.pop() if len(names) == 1 else None

    def take_over(self, version_name: str) -> None:
        _empty_prefix_cache(self._llm)  # a vLLM that needs this route has no names for weights


def _asked(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a call into the engine; whatever is not an error of ours is no answer."""
    try:
        return call(*args, **kwargs)
    except LograError:
        raise
    except Exception as error:
        if "[logra:" in str(error):
            raise
        raise NoAnswerError(f"the vLLM engine failed: {error}") from error


def _empty_prefix_cache(llm: Any) -> None:
    if not llm.reset_prefix_cache():
        raise SyncError("vLLM could not empty its prefix cache: are requests still running? Update between generations")
