"""A real vLLM server follows a run over HTTP, with the flags of docs/vllm.md."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest

from logra.errors import PacketError, SyncError
from logra.integrations.vllm import VLLMServer

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

START_S = 600
"""Half a minute on two idle cores."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def server(probe, trained, tmp_path_factory):
    """Address of a server with the base model."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    # `python -m` instead of `vllm serve`: the CPU build's command does not find its own version.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(trained.base), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4", "--host", "127.0.0.1", "--port", str(port),
        "--weight-transfer-config", '{"backend": "logra"}', "--logprobs-mode", "processed_logprobs",
        "--kv-cache-memory-bytes", str(2**26), "--block-size", "32",
    ]  # fmt: skip
    environment = os.environ | probe.ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_for(url, process, log):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(log.read_text()[-4000:])


def ask(url, probe):
    """The same questions as those of `probe.ask`, over HTTP."""

    def complete(**settings):
        body = {"prompt": probe.PROMPT, "temperature": 0, "ignore_eos": True, **settings}
        with urllib.request.urlopen(as_request(url + "/v1/completions", body), timeout=120) as response:
            return json.load(response)["choices"][0]

    logprobs = complete(max_tokens=probe.NUM_TOKENS, logprobs=0, return_tokens_as_token_ids=True)["logprobs"]
    prompt = complete(max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    return {
        "token_ids": [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]],
        "logprobs": logprobs["token_logprobs"],
        "prompt_logprobs": [
            entry[str(token)]["logprob"] for token, entry in zip(probe.PROMPT, prompt, strict=True) if entry
        ],
    }


def test_the_server_follows_refuses_and_recovers(server, probe, trained):
    # One test, because a server takes half a minute to start: the steps build on each other.
    client = VLLMServer(server)
    with pytest.raises(SyncError, match="attach"):
        client.version()
    assert client.attach(trained.log.manifest) == 0
    assert client.version() == 0
    ask(server, probe)  # fills the prefix cache
    updates = trained.updates
    for update in updates[:3]:
        assert client.push(update) == update.version

    at_three = ask(server, probe)
    for wrong in (updates[0], updates[4], replace(updates[3], run_id="another")):
        with pytest.raises(PacketError, match="the engine answers"):
            client.push(wrong)
        assert client.version() == 3
    assert ask(server, probe) == at_three

    assert client.catch_up(trained.log) == 5
    # Log-probabilities of a fresh engine in another process, through JSON: the same bits.
    assert ask(server, probe) == trained.answer

    # A second trainer process finds the engine where it is.
    assert VLLMServer(server).attach(trained.log.manifest) == 5

    post(server, "/weight_checker", {"action": "reset"})  # zeros in all parameters
    assert client.version() is None
    with pytest.raises(SyncError):
        client.push(updates[4])
    assert client.load(trained.weights, 5) == 5
    assert client.version() == 5
    assert ask(server, probe) == trained.answer


def test_trl_sends_updates_to_the_server(server, train_with_trl, tools, probe, model_folder, tmp_path):
    # The server follows another run, or none: the trainer finds out, and sends full weights once.
    trainer = train_with_trl(vllm_mode="server", vllm_server_base_url=server)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["sync/rollout_version"] for entry in steps] == [0, 1, 2]
    assert all(0 < entry["sync/delivered_bytes"] < 5e6 for entry in steps[1:])
    assert trainer.vllm_generation.metrics()["sync/anchors"] <= 1
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in steps)
    trainer.vllm_generation.sync_weights()
    tools.save(trainer.model, model_folder, tmp_path / "model")
    assert ask(server, probe) == tools.fresh_answer(probe, tmp_path / "model")


def post(url, path, body):
    urllib.request.urlopen(as_request(url + path, body), timeout=60).close()


def as_request(url, body):
    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
