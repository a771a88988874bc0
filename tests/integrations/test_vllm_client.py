"""What the trainer's side says to an engine, against stand-ins that behave as vLLM does and hold a real session."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch

from logra.errors import ConfigError, PacketError, SyncError
from logra.integrations.vllm import VLLMEngine, VLLMServer, WorkerExtension
from logra.integrations.vllm.client import NoAnswerError, anchor_parts
from logra.integrations.vllm.messages import InitInfo, UpdateInfo, telling_errors
from logra.integrations.vllm.session import Session
from logra.integrations.vllm.sleep import SESSION
from logra.sync import DirectoryLog


class Engine:
    """vLLM's state around a session: rounds, the name of the weights, the prefix cache."""

    def __init__(self, model) -> None:
        self.session = Session(model)
        self.is_active = False
        self.name = "default"
        self.num_cache_resets = 0
        self.num_messages = 0
        self.is_paused = False

    def init(self, init_info):
        with telling_errors():
            self.session.join(InitInfo(**init_info))

    def start(self):
        if self.is_active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.is_active = True

    def update(self, update_info):
        if not self.is_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        self.num_messages += 1
        try:
            with telling_errors():
                self.session.receive(UpdateInfo(**update_info))
        except BaseException:
            self.is_active = False
            raise

    def finish(self, name):
        if not self.is_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.is_active = False
        self.name = self.name if name is None else name


class BackendLLM:
    """`vllm.LLM` with the weight-transfer backend."""

    def __init__(self, model) -> None:
        self.engine = Engine(model)
        config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="logra"),
            parallel_config=SimpleNamespace(worker_extension_cls=""),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def init_weight_transfer_engine(self, request):
        self.engine.init(request["init_info"])

    def start_weight_update(self):
        self.engine.start()

    def update_weights(self, request):
        self.engine.update(request["update_info"])

    def finish_weight_update(self, weight_version=None):
        self.engine.finish(weight_version)

    def update_weight_version(self, new_version):
        self.engine.name = new_version

    def get_weight_version(self):
        return self.engine.name

    def reset_prefix_cache(self):
        self.engine.num_cache_resets += 1
        return True


class ExtensionLLM:
    """`vllm.LLM` with the worker extension and no backends."""

    def __init__(self, model) -> None:
        self.engine = Engine(model)
        parallel = SimpleNamespace(worker_extension_cls="logra.integrations.vllm.WorkerExtension")
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
        self._worker = WorkerExtension()
        setattr(self._worker, SESSION, self.engine.session)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.engine.num_messages += method == "logra_update"
        return [getattr(self._worker, method)(*args)]

    def reset_prefix_cache(self):
        self.engine.num_cache_resets += 1
        return True


class Handler(BaseHTTPRequestHandler):
    """The endpoints of `vllm serve` in development mode. Errors look as vLLM's do."""

    server: "Server"

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.handle_path()

    def do_POST(self):
        self.handle_path()

    def handle_path(self):
        url, engine = urlsplit(self.path), self.server.engine
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        answers = {
            "/init_weight_transfer_engine": lambda: engine.init(body["init_info"]),
            "/start_weight_update": engine.start,
            "/update_weights": lambda: engine.update(body["update_info"]),
            "/finish_weight_update": lambda: engine.finish(body.get("weight_version")),
            "/update_weight_version": lambda: setattr(engine, "name", body["new_version"]),
            "/weight_info": lambda: {"weight_version": engine.name},
            "/pause": lambda: setattr(engine, "is_paused", True),
            "/resume": lambda: setattr(engine, "is_paused", False),
            "/reset_prefix_cache": self.reset,
        }
        if url.path not in answers:
            self.answer(404, {"error": {"message": "Not Found"}})
            return
        try:
            content = answers[url.path]() or {}
        except Exception as error:
            text = f"Call to collective_rpc method failed: Worker failed with error '{error}', please check the stack trace"
            self.answer(500, {"error": {"message": text, "type": "InternalServerError", "code": 500}})
            return
        if url.path in self.server.mute:
            self.server.mute.discard(url.path)
            self.close_connection = True  # the work is done, the answer is lost
            return
        self.answer(200, content)

    def reset(self):
        self.server.engine.num_cache_resets += 1
        return {"success": True}

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    def __init__(self, model) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine = Engine(model)
        self.requests: list = []
        self.mute: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def serve():
    """Starts stand-ins of `vllm serve`."""
    servers = []

    def start(model) -> Server:
        server = Server(model)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=["backend", "extension", "http"])
def connect(request, serve):
    """(client, stand-in engine) over each of the three ways."""

    def make(model):
        if request.param == "http":
            server = serve(model)
            return VLLMServer(server.url), server.engine
        llm = BackendLLM(model) if request.param == "backend" else ExtensionLLM(model)
        return VLLMEngine(llm), llm.engine

    return make


def weights_of(tools, engine):
    return tools.assemble([engine.session._replica.layout])


def test_the_engine_follows_update_by_update(tools, trainer, connect):
    client, engine = connect(tools.build_engine(trainer.weights[0]))
    assert client.attach(trainer.manifest) == 0
    assert client.version() == 0
    for update in trainer.updates:
        resets = engine.num_cache_resets
        assert client.push(update) == update.version
        assert client.version() == update.version
        # Catches a prefix cache that keeps what older weights computed.
        assert engine.num_cache_resets == resets + 1
        assert client.last_delivery.num_bytes == update.num_bytes
        tools.assert_same_bits(weights_of(tools, engine), trainer.weights[update.version])


def test_a_refused_update_leaves_the_engine_where_it_was_and_it_catches_up(tools, trainer, connect, tmp_path):
    client, engine = connect(tools.build_engine(trainer.weights[0]))
    client.attach(trainer.manifest)
    client.push(trainer.updates[0])
    resets = engine.num_cache_resets
    for wrong in (trainer.updates[0], trainer.updates[2], replace(trainer.updates[1], run_id="another")):
        with pytest.raises(PacketError, match="the engine answers"):
            client.push(wrong)
        assert client.version() == 1
        assert not engine.is_active
        assert not engine.is_paused
    assert engine.num_cache_resets > resets
    log = DirectoryLog(tmp_path / "log", trainer.manifest)
    for update in trainer.updates:
        log.append(update)
    assert client.catch_up(log) == len(trainer.updates)
    tools.assert_same_bits(weights_of(tools, engine), trainer.weights[-1])


def test_lost_weights_are_no_version_and_an_anchor_brings_them_back(tools, trainer, connect):
    client, engine = connect(tools.build_engine(trainer.weights[0]))
    client.attach(trainer.manifest)
    client.push(trainer.updates[0])
    for parameter in engine.session._model.parameters():
        parameter.zero_()
    # Catches an answer from what vLLM remembers: it still calls the weights version 1.
    assert client.version() is None
    with pytest.raises(SyncError, match=r"needs an anchor|cannot apply"):
        client.push(trainer.updates[1])
    assert client.load(trainer.weights[2], 2) == 2
    assert client.version() == 2
    client.push(trainer.updates[2])
    tools.assert_same_bits(weights_of(tools, engine), trainer.weights[3])


def test_an_anchor_in_many_parts(tools, trainer, connect, monkeypatch):
    monkeypatch.setattr("logra.integrations.vllm.client.ANCHOR_PART_BYTES", 256)
    client, engine = connect(tools.build_engine(trainer.weights[1]))
    with pytest.raises(SyncError, match="not those of the base model"):
        client.attach(trainer.manifest)
    assert client.version() is None
    client.load(trainer.weights[3], 3)
    assert engine.num_messages > 4
    tools.assert_same_bits(weights_of(tools, engine), trainer.weights[3])
    with pytest.raises(SyncError, match="missing"):
        client.load({"model.norm.weight": trainer.weights[3]["model.norm.weight"]}, 3)
    assert client.version() is None


def test_parts_hold_every_weight_once():
    weights = {str(index): torch.zeros(index) for index in range(6)}
    parts = list(anchor_parts(weights, part_bytes=20))
    assert sorted(name for part in parts for name in part) == sorted(weights)
    assert [sum(tensor.nbytes for tensor in part.values()) for part in parts] == [12, 12, 16, 20]


def test_a_restarted_engine_is_attached_again(tools, trainer, serve):
    # The trainer's client remembers; the engine does not.
    server = serve(tools.build_engine(trainer.weights[0]))
    client = VLLMServer(server.url)
    client.attach(trainer.manifest)
    client.push(trainer.updates[0])
    server.engine = Engine(tools.build_engine(trainer.weights[0]))
    assert client.version() is None
    with pytest.raises(SyncError, match="follows no run"):
        client.push(trainer.updates[1])
    assert client.attach(trainer.manifest) == 0
    client.push(trainer.updates[0])
    assert client.push(trainer.updates[1]) == 2


def test_a_round_that_somebody_left_open_is_closed(tools, trainer, connect):
    client, engine = connect(tools.build_engine(trainer.weights[0]))
    client.attach(trainer.manifest)
    engine.is_active = True
    assert client.push(trainer.updates[0]) == 1


def test_a_lost_acknowledgement_does_not_count_twice(tools, trainer, serve):
    # Catches a retry: the engine would refuse the update as a duplicate, or worse, apply it again.
    server = serve(tools.build_engine(trainer.weights[0]))
    client = VLLMServer(server.url)
    client.attach(trainer.manifest)
    # The answer to the packet, to the end of the round, and to the end of the pause.
    for version, path in enumerate(("/update_weights", "/finish_weight_update", "/resume"), start=1):
        server.mute = {path}
        assert client.push(trainer.updates[version - 1]) == version
        assert client.version() == version
        tools.assert_same_bits(weights_of(tools, server.engine), trainer.weights[version])
        assert not server.engine.is_paused
    server.mute = {"/start_weight_update"}
    with pytest.raises(NoAnswerError):
        client.push(trainer.updates[3])
    assert client.version() == 3
    assert client.push(trainer.updates[3]) == 4
    assert not server.engine.is_paused


def test_generation_pauses_for_the_round_as_asked_and_the_key_is_sent(tools, trainer, serve):
    server = serve(tools.build_engine(trainer.weights[0]))
    client = VLLMServer(server.url, api_key="secret", pause="abort")
    client.attach(trainer.manifest)
    server.requests.clear()
    client.push(trainer.updates[0])
    paths = [path for path, _ in server.requests]
    assert paths == [
        "/pause?mode=abort", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache",
        "/resume",
    ]  # fmt: skip
    assert {key for _, key in server.requests} == {"Bearer secret"}


def test_a_server_that_is_not_there():
    with pytest.raises(NoAnswerError, match="does not answer"):
        VLLMServer("http://127.0.0.1:9", timeout_s=2).transport.version_name()


def test_a_server_without_the_endpoints_says_which_flags_it_needs(serve):
    server = serve(torch.nn.Module())
    client = VLLMServer(server.url + "/prefix")
    with pytest.raises(SyncError, match=r"VLLM_SERVER_DEV_MODE=1.*weight-transfer-config"):
        client.transport.version_name()


def test_an_engine_without_a_way_in_is_refused_with_the_flags_to_add():
    config = SimpleNamespace(weight_transfer_config=None, parallel_config=SimpleNamespace(worker_extension_cls=""))
    with pytest.raises(ConfigError, match=r"weight_transfer_config=.*worker_extension_cls="):
        VLLMEngine(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)))


def test_what_vllm_cannot_do_is_an_error(tools, trainer):
    llm = BackendLLM(tools.build_engine(trainer.weights[0]))
    client = VLLMEngine(llm)
    with pytest.raises(SyncError, match="attach"):
        client.push(trainer.updates[0])
    client.attach(trainer.manifest)
    llm.reset_prefix_cache = lambda: False
    with pytest.raises(SyncError, match="prefix cache"):
        client.push(trainer.updates[0])


def test_options_are_checked_where_they_are_given():
    with pytest.raises(SyncError, match="allowed are"):
        VLLMServer("http://127.0.0.1:9", storage="fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"url": "localhost:8000"}, {"url": "http://x", "pause": "never"}])
def test_addresses_and_options_are_checked(arguments):
    with pytest.raises(ConfigError, match="allowed"):
        VLLMServer(**arguments)
