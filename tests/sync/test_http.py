"""The log over HTTP: the same protocol, and servers and clients that do not trust each other."""

import http.client
import json
import logging
import socket
import socketserver
import threading
import time
from dataclasses import replace

import pytest
import torch

from logra.errors import PacketError, SyncError
from logra.sync import DirectoryLog, HTTPLog, LogServer, Publisher
from logra.update import PolicyUpdate

TOKEN = "0123456789abcdef-secret"


@pytest.fixture
def empty(tmp_path):
    return DirectoryLog(tmp_path / "served")


def request(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(*server._server.server_address[:2], timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def test_publish_and_follow_over_http(tools, run, empty, exact_kind):
    with LogServer(empty) as server:
        publisher = Publisher(HTTPLog(server.url))
        reader = HTTPLog(server.url)
        assert reader.manifest is None
        HTTPLog(server.url).start(run.manifest)
        follower = tools.build(exact_kind, run)
        for update in run.updates:
            publisher.publish(update)
            assert reader.latest() == update.version
            follower.catch_up(reader)
        tools.assert_same_bits(follower.weights(), run.weights[-1])
        assert reader.manifest == run.manifest
        assert [update.version for update in reader.read_since(4)] == [5, 6]
    assert [update.digest for update in DirectoryLog(empty.path).read_since(0)] == [u.digest for u in run.updates]


def test_an_append_can_be_repeated(run, empty):
    # Catches a lost acknowledgement that stops a run: the client cannot know whether its packet arrived.
    with LogServer(empty) as server:
        log = HTTPLog(server.url)
        log.start(run.manifest)
        log.start(run.manifest)
        assert log.append(run.updates[0]) == log.append(run.updates[0]) == len(run.updates[0].to_bytes())
        assert log.latest() == 1
        with pytest.raises(SyncError, match=r"status 409.*holds another update"):
            log.append(replace(run.updates[0], tensors={"norm.weight": torch.zeros(12)}))
        with pytest.raises(SyncError, match=r"status 409.*leaves a gap"):
            log.append(run.updates[2])
        with pytest.raises(PacketError, match=r"status 400.*run_id is 'other'"):
            log.append(replace(run.updates[1], run_id="other"))
        with pytest.raises(SyncError, match=r"status 409.*cannot become"):
            log.start(replace(run.manifest, run_id="other"))
        with pytest.raises(SyncError, match="nothing to continue version 5"):
            next(log.read_since(5))


def test_a_log_that_has_not_begun(run, empty):
    with LogServer(empty) as server:
        log = HTTPLog(server.url)
        assert log.manifest is None
        with pytest.raises(SyncError, match=r"status 404.*has not begun"):
            log.latest()


def test_damaged_packets_are_refused_by_the_server(run, empty):
    empty.start(run.manifest)
    data = bytearray(run.updates[0].to_bytes())
    data[200] ^= 1
    with LogServer(empty) as server:
        for path, body in (("/v1/updates/1", bytes(data)), ("/v1/updates/2", run.updates[0].to_bytes())):
            status, answer, _ = request(server, "PUT", path, body)
            assert status == 400, answer
        status, _, _ = request(server, "PUT", "/v1/manifest", b"{}")
        assert status == 409
    assert empty.latest() == 0


def test_a_full_disk_of_the_server_reaches_the_publisher(run, empty, monkeypatch):
    empty.start(run.manifest)

    def full(*_):
        raise OSError(28, "No space left on device")

    with LogServer(empty) as server:
        log = HTTPLog(server.url)
        with monkeypatch.context() as patch:
            patch.setattr("os.rename", full)
            with pytest.raises(SyncError, match=r"status 507.*free some space"):
                log.append(run.updates[0])
        log.append(run.updates[0])
        assert log.latest() == 1


def test_other_machines_need_a_token(empty):
    for host in ("0.0.0.0", "::", "example.invalid", "192.0.2.1"):
        with pytest.raises(SyncError, match="needs a token"):
            LogServer(empty, host)
    for token in ("", "short", "with space " * 3, "ümlaut" * 5, "line\nbreak" * 3):
        with pytest.raises(SyncError, match="token: allowed are"):
            LogServer(empty, token=token)
        with pytest.raises(SyncError, match="token: allowed are") as caught:
            HTTPLog("http://127.0.0.1:1", token)
        assert not token or token not in str(caught.value)
    LogServer(empty, "0.0.0.0", token=TOKEN).close()
    LogServer(empty, "localhost").close()


def test_every_request_needs_the_token(run, empty):
    with LogServer(empty, token=TOKEN) as server:
        HTTPLog(server.url, TOKEN).start(run.manifest)
        for token in (None, TOKEN + "x", TOKEN[:-1] + "T", "0" * 16):
            log = HTTPLog(server.url, token)
            for action in (lambda log=log: log.manifest, log.latest, lambda log=log: log.append(run.updates[0])):
                with pytest.raises(SyncError, match=r"status 401.*token is missing or wrong"):
                    action()
        for header in (TOKEN, f"bearer {TOKEN}", "Bearer", "Bearer \xfc"):
            assert request(server, "GET", "/v1/latest", headers={"Authorization": header})[0] == 401
        assert empty.latest() == 0
        log = HTTPLog(server.url, TOKEN)
        log.append(run.updates[0])
        assert log.latest() == 1


def test_the_token_is_compared_in_constant_time(run, empty, monkeypatch):
    compared = []
    import hmac

    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b))
    with LogServer(empty, token=TOKEN) as server:
        assert request(server, "GET", "/v1/latest")[0] == 401
    assert compared == [(b"", f"Bearer {TOKEN}".encode())]


def test_sizes_are_checked_before_a_body_is_read(run, empty):
    empty.start(run.manifest)
    with LogServer(empty, max_packet_bytes=1000) as server:
        for path, length, expected in (
            ("/v1/updates/1", "1001", 413),
            ("/v1/updates/1", "9" * 30, 413),
            ("/v1/manifest", str(2**20), 413),
            ("/v1/updates/1", "-5", 411),
            ("/v1/updates/1", "x", 411),
        ):
            # No body is sent: a server that waits for it would run into the timeout.
            status, _, headers = request(server, "PUT", path, headers={"Content-Length": length})
            assert (status, headers["Connection"]) == (expected, "close")
        chunked = {"Transfer-Encoding": "chunked", "Content-Length": "5"}
        assert request(server, "PUT", "/v1/updates/1", headers=chunked)[0] == 411


def test_a_packet_that_unpacks_to_much_more_is_refused(run, empty, monkeypatch):
    # Catches a few kB that make the server allocate gigabytes.
    monkeypatch.setattr("logra.sync.http_server._MIN_PAYLOAD_LIMIT", 0)
    empty.start(run.manifest)
    bomb = PolicyUpdate(0, 1, run.seed, 0, {}, {"norm.weight": torch.zeros(2**20)}, run.manifest.run_id)
    bomb = replace(bomb, weight_storage=run.storage)
    with LogServer(empty) as server, pytest.raises(PacketError, match=r"status 400.*payload has"):
        HTTPLog(server.url).append(bomb)


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/updates", "/v1/updates/", "/v1/updates/x", "/v1/updates/-1", "/v1/updates/" + "9" * 40,
     "/v1/updates/0", "/v1/updates/7", "/v1/updates/../manifest.json", "/v2/latest", "/v1/latest?x=1"],
)  # fmt: skip
def test_other_addresses_do_not_exist(runs, tmp_path, path):
    log = DirectoryLog(tmp_path / "served", runs["fp32"].manifest)
    with LogServer(log) as server:
        assert request(server, "GET", path)[0] == 404
        assert request(server, "POST", "/v1/latest")[0] == 501


def test_two_servers_cannot_share_a_port(empty):
    with LogServer(empty) as server:
        port = server._server.server_address[1]
        with pytest.raises(SyncError, match="cannot listen"):
            LogServer(empty, port=port)


def test_silent_connections_are_closed(empty):
    # Catches threads that are held forever by clients that never finish a request.
    with (
        LogServer(empty, timeout_s=0.2) as server,
        socket.create_connection(server._server.server_address[:2], timeout=10) as connection,
    ):
        connection.sendall(b"GET /v1/latest HTT")
        assert connection.recv(100) == b""


def test_concurrent_appends_leave_one_winner(runs, empty):
    # Catches two requests that both see version 0 and both write version 1.
    run = runs["fp32"]
    empty.start(run.manifest)
    variants = [replace(run.updates[0], tensors={"norm.weight": torch.full((12,), float(i))}) for i in range(8)]
    with LogServer(empty) as server:
        outcomes = []

        def append(update):
            try:
                HTTPLog(server.url).append(update)
                outcomes.append(update.digest)
            except SyncError:
                outcomes.append(None)

        threads = [threading.Thread(target=append, args=(update,)) for update in variants]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    winners = [digest for digest in outcomes if digest is not None]
    assert winners == [DirectoryLog(empty.path).read(1).digest]


# ---- servers that are not ours


class Puppet(socketserver.BaseRequestHandler):
    """Sends fixed bytes, whatever is asked."""

    answer = b""
    delay_s = 0.0

    def handle(self) -> None:
        self.request.recv(2**16)
        time.sleep(self.delay_s)
        self.request.sendall(self.answer)


@pytest.fixture
def puppet():
    """Starts a server that answers with these bytes; returns its address."""
    servers = []

    def start(answer: bytes, delay_s: float = 0.0) -> str:
        handler = type("Handler", (Puppet,), {"answer": answer, "delay_s": delay_s})
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def http_answer(body: bytes, sha256: str | None = None, length: int | None = None) -> bytes:
    import hashlib

    digest = hashlib.sha256(body).hexdigest() if sha256 is None else sha256
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) if length is None else length}\r\n"
    return (head + f"X-Content-SHA256: {digest}\r\n\r\n").encode() + body


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"", SyncError, "cannot be reached"),
        (b"garbage\r\n\r\n", SyncError, "cannot be reached"),
        (http_answer(b'{"version": 3}', sha256="0" * 64), PacketError, "SHA-256"),
        (http_answer(b'{"version": 3}', length=99), SyncError, "cannot be reached"),
        (http_answer(b'{"version": -3}'), SyncError, "answered with version -3"),
        (http_answer(b'{"version": "3"}'), SyncError, "answered with version '3'"),
        (http_answer(b"[]"), SyncError, "did not answer with a version"),
        (http_answer(b"x" * 5000), SyncError, "answers with 5000 bytes; allowed are at most 1000"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 15 + b"\r\n\r\n", SyncError, "allowed are at most 1000"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 5000, SyncError, "more than 1000"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno", SyncError, "status 500: no explanation"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n", SyncError, "status 302"),
    ],
)
def test_answers_that_are_wrong_are_refused(puppet, answer, error, message):
    log = HTTPLog(puppet(answer), timeout_s=5.0, max_packet_bytes=1000)
    with pytest.raises(error, match=message):
        log.latest()


def test_the_client_waits_only_so_long(puppet):
    log = HTTPLog(puppet(b"", delay_s=5.0), timeout_s=0.2)
    start = time.perf_counter()
    with pytest.raises(SyncError, match="cannot be reached"):
        log.latest()
    assert time.perf_counter() - start < 3
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with pytest.raises(SyncError, match="cannot be reached"):
        HTTPLog(f"http://127.0.0.1:{port}").latest()


def test_a_server_that_sends_another_update_is_found(run, empty, monkeypatch):
    empty.start(run.manifest)
    for update in run.updates:
        empty.append(update)
    with LogServer(empty) as server:
        monkeypatch.setattr(empty, "read_packet", lambda version: run.updates[0].to_bytes())
        with pytest.raises(PacketError, match="asked was for version 3"):
            next(HTTPLog(server.url).read_since(2))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://x", "http://", "http://x/path", "http://x?y=1", "file:///etc"]
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(SyncError, match="url is"):
        HTTPLog(url)


def test_nothing_is_printed(run, empty, capsys, caplog):
    caplog.set_level(logging.INFO)
    with LogServer(empty) as server:
        HTTPLog(server.url).start(run.manifest)
        request(server, "GET", "/nothing")
    captured = capsys.readouterr()
    assert (captured.out, captured.err, caplog.text) == ("", "", "")
    assert json.loads(run.manifest.to_json())


def test_a_remote_replica_starts_from_an_anchor(tools, run, log, monkeypatch):
    # Catches a client that can only come from the base, and one that takes an anchor beyond what it was asked for.
    monkeypatch.setattr("logra.sync.replica._ANCHOR_DISTANCE", 3)
    for version in (2, 4, 6):
        log.write_anchor(version, {name: v for name, v in run.weights[version].items() if name != "embed.weight"})
    with LogServer(log) as server:
        remote = HTTPLog(server.url)
        assert [remote.latest_anchor(limit) for limit in (1, 2, 5, 9)] == [None, 2, 4, 6]
        follower = tools.build("fp32-module", run)
        assert follower.catch_up(remote, until=5) == 1
        tools.assert_same_bits(follower.weights(), run.weights[5])
        (replica,) = follower.replicas
        replica.invalidate("the engine restarted")
        assert replica.catch_up(remote) == 0
        tools.assert_same_bits(follower.weights(), run.weights[6])
        with pytest.raises(SyncError, match="no such anchor"):
            remote.read_anchor(3)
        with pytest.raises(SyncError, match="holds no anchors"):
            Publisher(remote, anchor_every=2, digest_every=0, optimizer=object())  # pyright: ignore[reportArgumentType]
        path = log.anchor_path(4)
        data = bytearray(path.read_bytes())
        data[-3] ^= 16
        path.write_bytes(data)
        with pytest.raises(SyncError, match="damaged"):
            remote.read_anchor(4)


def test_an_anchor_that_is_cut_off_is_no_anchor(runs, tmp_path, monkeypatch):
    # Catches a download that ends early and is read as a file that is whole.
    run = runs["fp32"]
    log = DirectoryLog(tmp_path / "updates", run.manifest)
    log.append(run.updates[0])
    log.write_anchor(1, run.weights[1])
    monkeypatch.setattr("logra.sync.http_server.shutil.copyfileobj", lambda file, out, size: out.write(file.read(100)))
    with LogServer(log) as server, pytest.raises(SyncError, match=r"cannot be reached|did not arrive"):
        HTTPLog(server.url, timeout_s=1.0).read_anchor(1)
