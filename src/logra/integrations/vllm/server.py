"""`VLLMServer`: keeps a `vllm serve` on the versions of a run, over its HTTP endpoints.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "logra"}'

A round pauses generation, sends its messages, empties the prefix cache and resumes: no token is sampled from weights that
are half written, and none after the acknowledgement from older ones.
"""

import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

from logra.errors import ConfigError, SyncError
from logra.integrations.vllm.client import EngineClient, NoAnswerError, Transport
from logra.integrations.vllm.engine import ALREADY_ACTIVE
from logra.integrations.vllm.messages import EngineStorage, LowPlane, to_text

PauseMode = Literal["wait", "abort"]


class VLLMServer(EngineClient):
    """A vLLM server with the weight-transfer backend `logra`.

    Args:
        url: of the server, http://host:port; a path in front of the endpoints is allowed.
        api_key: of the server (`vllm serve --api-key`); None without one.
        timeout_s: longest silence of the server, seconds. While it waits for running requests it is silent.
        pause: what happens to running requests when an update arrives: they are waited for, or aborted.
        storage: for bf16 engines: "exact" (the default) keeps the low plane, "bf16" does without.
        low_plane: "host" or "device".

    Raises:
        ConfigError: an address that is none.

    Example:
        >>> server = VLLMServer("http://127.0.0.1:8000")
        >>> server.attach(publisher.log.manifest)
        >>> server.push(publisher.publish(opt.last_update))
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        pause: PauseMode = "wait",
        storage: EngineStorage = "auto",
        low_plane: LowPlane = "host",
    ) -> None:
        super().__init__(storage=storage, low_plane=low_plane)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"VLLMServer: url is {url!r}; allowed is http://host:port or https://host:port")
        if pause not in ("wait", "abort"):
            raise ConfigError(f"VLLMServer: pause is {pause!r}; allowed are 'wait' and 'abort'")
        self._transport = _HTTPTransport(url, api_key, timeout_s, pause)

    @property
    def transport(self) -> Transport:
        """The way to the engine."""
        return self._transport


class _HTTPTransport:
    def __init__(self, url: str, api_key: str | None, timeout_s: float, pause: PauseMode) -> None:
        parts = urlsplit(url)
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._timeout_s = parts.hostname or "", parts.port, timeout_s
        self._url = url
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._pause = pause

    def init(self, info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def update(self, infos: Iterator[dict[str, Any]], version_name: str) -> None:
        self._post(f"/pause?mode={self._pause}")
        try:
            try:
                self._round(infos, version_name)
            finally:
                self._empty_prefix_cache()
        finally:
            self._post("/resume")

    def version_name(self) -> str | None:
        return self._get("/weight_info").get("weight_version")

    def take_over(self, version_name: str) -> None:
        self._post("/update_weight_version", {"new_version": version_name})
        self._empty_prefix_cache()
        self._post("/resume")

    def _round(self, infos: Iterator[dict[str, Any]], version_name: str) -> None:
        self._start()
        try:
            for info in infos:
                self._post("/update_weights", {"update_info": _as_json(info)})
        except SyncError:
            self._close()
            raise
        self._post("/finish_weight_update", {"weight_version": version_name})

    def _start(self) -> None:
        try:
            self._post("/start_weight_update")
        except NoAnswerError as error:
            if ALREADY_ACTIVE not in str(error):
                raise
            self._close()
            self._post("/start_weight_update")

    def _close(self) -> None:
        """End a round that failed or that somebody left open; it is closed already on workers that raised."""
        with suppress(NoAnswerError):
            self._post("/finish_weight_update", {})

    def _empty_prefix_cache(self) -> None:
        if self._post("/reset_prefix_cache").get("success", True) is not True:
            raise SyncError(f"the vLLM server at {self._url} could not empty its prefix cache")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._request("POST", path, None if body is None else json.dumps(body).encode())

    def _get(self, path: str) -> dict[str, Any]:
        return self._request("GET", path, None)

    def _request(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        # One connection a request: between two updates the server would have closed it.
        connection = self._connection_class(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            status, text = response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"the vLLM server at {self._url} does not answer {path}: {error}") from error
        finally:
            connection.close()
        if status == 200:
            return _object(text)
        if status == 404:
            raise SyncError(
                f"the vLLM server at {self._url} has no {path}: start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                f'and --weight-transfer-config \'{{"backend": "logra"}}\''
            )
        message = _object(text).get("error") or text
        raise NoAnswerError(
            f"the vLLM server at {self._url} answers {status} to {path}: "
            f"{message.get('message', message) if isinstance(message, dict) else message}"
        )


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text) if text else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _as_json(info: dict[str, Any]) -> dict[str, Any]:
    return {name: to_text(value) if isinstance(value, bytes) else value for name, value in info.items()}
