"""A log over HTTP: the server.

    GET  /v1/manifest              the manifest (JSON); 404 before the log has begun
    PUT  /v1/manifest              begin the log; 204, or 409 where it has begun otherwise
    GET  /v1/latest                {"version": n}
    GET  /v1/updates/{version}     the packet, with its SHA-256 in the header X-Content-SHA256; 404 where there is none
    GET  /v1/anchors               {"versions": [...]}, of the anchors that there are
    GET  /v1/anchors/{version}     the anchor, a safetensors file with a digest of its own; 404 where there is none
    PUT  /v1/updates/{version}     append a packet; 204 when it is durable, 400 damaged, 409 gap or another run, 507 disk

Errors carry {"error": "..."}. With a token every request needs `Authorization: Bearer TOKEN`; the comparison takes the same
time whatever was sent. Without a token the server listens on loopback addresses only. There is no encryption: over a
network that others can read, put it behind a TLS proxy. Nothing is unpickled, and sizes are checked before a body is read.
"""

import hashlib
import hmac
import ipaddress
import json
import logging
import os
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from logra.errors import LograError, PacketError, SyncError
from logra.sync.log import DirectoryLog
from logra.sync.manifest import Manifest

logger = logging.getLogger("logra")

MAX_PACKET_BYTES = 2**30
"""Largest packet that server and client accept by default."""
_MAX_MANIFEST_BYTES = 2**16
# A payload may be this large whatever the size of its packet, and above it so many times the packet. Deltas of tensors
# that hardly move reach a few hundred; zstd reaches more on packets that were made to exhaust memory.
_MIN_PAYLOAD_LIMIT, _MAX_EXPANSION = 2**26, 1024
_MIN_TOKEN_LENGTH = 16


class LogServer:
    """Serves a `DirectoryLog` to `HTTPLog` clients, in threads of this process.

    Args:
        log: the log. Other processes may read it meanwhile; only one should write.
        host: address to listen on. Anything but a loopback address needs a token.
        port: 0 takes a free one, see `url`.
        token: secret of at least 16 printable ASCII characters that every request must carry; None for none.
        max_packet_bytes: larger requests are refused unread.
        timeout_s: a connection that is silent for so long is closed, seconds.

    Raises:
        SyncError: another address than loopback without a token, or a token that is too short.

    Example:
        >>> with logra.sync.LogServer(logra.sync.DirectoryLog("run/updates")) as server:
        ...     log = logra.sync.HTTPLog(server.url)
    """

    def __init__(
        self,
        log: DirectoryLog,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        max_packet_bytes: int = MAX_PACKET_BYTES,
        timeout_s: float = 30.0,
    ) -> None:
        if token is not None:
            check_token(token)
        elif not is_loopback(host):
            raise SyncError(
                f"LogServer: host={host!r} is reachable from other machines and needs a token: anybody could read the "
                f"weights and append to the log. Pass token=..., or host='127.0.0.1'"
            )
        settings = {"log": log, "token": token, "max_packet_bytes": max_packet_bytes, "timeout": timeout_s}
        handler = type("Handler", (_Handler,), settings)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        try:
            self._server: ThreadingHTTPServer = server((host, port), handler)
        except OSError as error:
            raise SyncError(f"LogServer: cannot listen on host={host!r}, port={port}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """Address for `HTTPLog`."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def start(self) -> "LogServer":
        """Listen, in a thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening. Requests that are running are not waited for."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> "LogServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_token(token: str) -> None:
    """Refuse a token that can be guessed or that no header can carry.

    Raises:
        SyncError: see above. The token is not shown.
    """
    if len(token) < _MIN_TOKEN_LENGTH or not all("!" <= character <= "~" for character in token):
        raise SyncError(f"token: allowed are at least {_MIN_TOKEN_LENGTH} printable ASCII characters without spaces")


class _HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection. The class attributes are set by `LogServer`."""

    protocol_version = "HTTP/1.1"
    server_version = "logra"
    sys_version = ""
    log: DirectoryLog
    token: str | None
    max_packet_bytes: int

    def do_GET(self) -> None:
        """Read manifest, version or packet."""
        self._handle(self._get)

    def do_PUT(self) -> None:
        """Begin the log or append to it."""
        self._handle(self._put)

    def log_message(self, format: str, *args: Any) -> None:
        """To the logger of the library, not to standard error."""
        logger.debug("log server: %s", format % args)

    def _handle(self, action: Any) -> None:
        try:
            self._authorise()
            action()
        except _HttpError as error:
            self._refuse(error.status, str(error))
        except PacketError as error:
            self._refuse(400, str(error))
        except SyncError as error:
            failed = 507 if self.command == "PUT" else 500
            self._refuse(failed if isinstance(error.__cause__, OSError) else 409, str(error))
        except LograError as error:
            self._refuse(400, str(error))

    def _authorise(self) -> None:
        if self.token is None:
            return
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise _HttpError(401, "the token is missing or wrong")

    def _get(self) -> None:
        if self.path == "/v1/manifest":
            self._answer(200, self._manifest().to_json().encode(), "application/json")
        elif self.path == "/v1/latest":
            self._manifest()
            self._answer(200, json.dumps({"version": self.log.latest()}).encode(), "application/json")
        elif self.path == "/v1/anchors":
            self._manifest()
            self._answer(200, json.dumps({"versions": self.log.anchors()}).encode(), "application/json")
        elif self.path.startswith("/v1/anchors/"):
            self._manifest()
            self._answer_file(self.log.anchor_path(self._version_of_path("/v1/anchors")))
        else:
            version = self._version_of_path("/v1/updates")
            manifest = self._manifest()
            if not manifest.base.version < version <= self.log.latest():
                raise _HttpError(404, f"there is no update to version {version}")
            self._answer(200, self.log.read_packet(version), "application/octet-stream")

    def _put(self) -> None:
        if self.path == "/v1/manifest":
            self.log.start(Manifest.from_json(self._body(_MAX_MANIFEST_BYTES)))
        else:
            version = self._version_of_path("/v1/updates")
            data = self._body(self.max_packet_bytes)
            limit = max(_MIN_PAYLOAD_LIMIT, _MAX_EXPANSION * len(data))
            self.log.append_packet(data, version=version, max_payload_bytes=limit)
        self._answer(204, b"", None)

    def _manifest(self) -> Manifest:
        if (manifest := self.log.manifest) is None:
            raise _HttpError(404, "the log has not begun")
        return manifest

    def _version_of_path(self, expected: str) -> int:
        prefix, _, number = self.path.rpartition("/")
        if prefix != expected or not (number.isascii() and number.isdecimal() and len(number) <= 19):
            raise _HttpError(404, "no such address")
        return int(number)

    def _body(self, max_bytes: int) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or self.headers.get("Transfer-Encoding"):
            raise _HttpError(411, "a Content-Length is needed")
        if len(length) > 19 or int(length) > max_bytes:
            raise _HttpError(413, f"the body has {length:.20} bytes; allowed are at most {max_bytes}")
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise _HttpError(400, "the body ended early")
        return data

    def _refuse(self, status: int, message: str) -> None:
        # What is left of an unread body would be taken for the next request.
        self.close_connection = True
        self._answer(status, json.dumps({"error": message}).encode(), "application/json")

    def _answer_file(self, path: Path) -> None:
        """A file in pieces. It may have many gigabytes: it is not read twice to send its SHA-256 ahead."""
        try:
            file = path.open("rb")
        except FileNotFoundError as error:
            raise _HttpError(404, "there is no such anchor") from error
        with file:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, 2**20)

    def _answer(self, status: int, body: bytes, content_type: str | None) -> None:
        self.send_response(status)
        if content_type is not None:
            self.send_header("Content-Type", content_type)
            self.send_header("X-Content-SHA256", hashlib.sha256(body).hexdigest())
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
