"""A log over HTTP: the client. The protocol is described in `logra.sync.http_server`."""

import contextlib
import hashlib
import http.client
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from torch import Tensor

from logra.errors import PacketError, SyncError
from logra.sync import anchor
from logra.sync.http_server import MAX_PACKET_BYTES, check_token
from logra.sync.manifest import Manifest
from logra.update import PolicyUpdate

_CHUNK_BYTES = 2**20


class HTTPLog:
    """A log that a `LogServer` keeps, with the interface of `DirectoryLog`, except that it only reads anchors.

    Args:
        url: address of the server, http://host:port or https://host:port, without a path.
        token: secret of the server; None for a server without one.
        timeout_s: longest silence of the server that is waited for, seconds.
        max_packet_bytes: larger answers are refused.

    Raises:
        SyncError: the address or the token cannot be used. The methods raise it too: the server cannot be reached in
            time, refuses, or sends something that is not what was asked for.

    Example:
        >>> replica.catch_up(logra.sync.HTTPLog("http://127.0.0.1:8123"))
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        max_packet_bytes: int = MAX_PACKET_BYTES,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise SyncError(f"HTTPLog: url is {url!r}; allowed is http://host:port or https://host:port")
        if token is not None:
            check_token(token)
        self.url = url
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._token = token
        self._timeout_s = timeout_s
        self._max_packet_bytes = max_packet_bytes
        self._manifest: Manifest | None = None

    @property
    def manifest(self) -> Manifest | None:
        """What the log says about itself; None before it has begun."""
        if self._manifest is None:
            status, body = self._request("GET", "/v1/manifest")
            if status == 404:
                return None
            self._manifest = Manifest.from_json(self._checked(status, body))
        return self._manifest

    def start(self, manifest: Manifest) -> None:
        """Begin the log of a run; does nothing where it has begun with the same manifest."""
        self._checked(*self._request("PUT", "/v1/manifest", manifest.to_json().encode()))
        self._manifest = manifest

    def append(self, update: PolicyUpdate) -> int:
        """Add the update that leads to the next version; returns bytes of its packet when the server has it durably.

        After an error that leaves open whether it arrived, call it again with the same update.
        """
        data = update.to_bytes()
        self._checked(*self._request("PUT", f"/v1/updates/{update.version}", data))
        return len(data)

    def read_since(self, version: int) -> Iterator[PolicyUpdate]:
        """The updates after `version` that are there now, in order. Call again to follow a writer.

        Raises:
            SyncError: see the class; or the log does not hold `version`.
            PacketError: a packet is damaged, or is not the one that was asked for.
        """
        manifest, latest = self.manifest, self.latest()
        if manifest is None or not manifest.base.version <= version <= latest:
            raise SyncError(f"{self.url} ends at version {latest}; it has nothing to continue version {version} with")
        for number in range(version + 1, latest + 1):
            update = PolicyUpdate.from_bytes(self._checked(*self._request("GET", f"/v1/updates/{number}")))
            if (update.version, update.run_id) != (number, manifest.run_id):
                raise PacketError(
                    f"{self.url} sent the update to version {update.version} of run {update.run_id!r}; asked was for "
                    f"version {number} of run {manifest.run_id!r}"
                )
            yield update

    def latest(self) -> int:
        """The newest version; that of the base model where there is no update yet."""
        body = self._checked(*self._request("GET", "/v1/latest"))
        try:
            version = json.loads(body)["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise SyncError(f"{self.url} did not answer with a version: {error}") from error
        if type(version) is not int or not 0 <= version < 2**63:
            raise SyncError(f"{self.url} answered with version {version!r:.40}")
        return version

    # ---- anchors ----

    def latest_anchor(self, at_most: int) -> int | None:
        """The newest version up to `at_most` that has an anchor; None without one."""
        body = self._checked(*self._request("GET", "/v1/anchors"))
        try:
            versions = [version for version in json.loads(body)["versions"] if version <= at_most]
        except (ValueError, TypeError, KeyError) as error:
            raise SyncError(f"{self.url} did not answer with versions: {error}") from error
        if not all(type(version) is int and version >= 0 for version in versions):
            raise SyncError(f"{self.url} answered with versions {versions!r:.80}")
        return max(versions, default=None)

    def read_anchor(self, version: int) -> dict[str, Tensor]:
        """The weights of an anchor, on the CPU. It passes through a temporary file, since it may have many gigabytes.

        Raises:
            SyncError: see the class; or it is missing, damaged, or of another run or version.
        """
        manifest = self.manifest
        if manifest is None:
            raise SyncError(f"{self.url} has no log, and so no anchors")
        with tempfile.NamedTemporaryFile(prefix="logra-anchor-", suffix=".safetensors") as file:
            with self._response("GET", f"/v1/anchors/{version}") as response:
                if response.status != 200:
                    self._checked(response.status, self._read(response))
                self._copy(response, file)
            file.flush()
            return anchor.read(Path(file.name), run_id=manifest.run_id, version=version)

    # ---- inside ----

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer; its SHA-256 is checked where there is a body."""
        with self._response(method, path, body) as response:
            data = self._read(response)
            expected = response.headers.get("X-Content-SHA256")
        if response.status == 200 and hashlib.sha256(data).hexdigest() != expected:
            raise PacketError(
                f"{self.url}{path}: the SHA-256 of the answer is not what its header says; fetch it again"
            )
        return response.status, data

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """The answer, whose body can be read inside."""
        connection = self._connection_class(self._host, self._port, timeout=self._timeout_s)
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        try:
            connection.request(method, path, body, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise SyncError(
                f"{self.url} cannot be reached ({type(error).__name__}: {error}). The log is as it was, or holds the whole "
                f"update; try again"
            ) from error
        finally:
            connection.close()

    def _copy(self, response: http.client.HTTPResponse, file: IO[bytes]) -> None:
        """A body of any size into a file."""
        try:
            shutil.copyfileobj(response, file, _CHUNK_BYTES)
        except http.client.HTTPException:
            raise
        except OSError as error:
            raise SyncError(
                f"{self.url}: the anchor did not arrive, or the temporary folder is full: {error}"
            ) from error
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        length = response.length
        if length is not None and length > self._max_packet_bytes:
            raise SyncError(f"{self.url} answers with {length} bytes; allowed are at most {self._max_packet_bytes}")
        chunks, num_bytes = [], 0
        while chunk := response.read(_CHUNK_BYTES):
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > self._max_packet_bytes:
                raise SyncError(f"{self.url} answers with more than {self._max_packet_bytes} bytes")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(chunks)

    def _checked(self, status: int, body: bytes) -> bytes:
        """The body of a good answer."""
        if status in (200, 204):
            return body
        try:
            message = str(json.loads(body)["error"])
        except (ValueError, TypeError, KeyError):
            message = "no explanation"
        error = PacketError if status == 400 else SyncError
        raise error(f"{self.url} refused with status {status}: {message:.2000}")
