"""Small vLLM engines that follow updates, built in the three ways in which a trainer can have one.

    in_process      `vllm.LLM` in this process
    other_process   `vllm.LLM` with its engine in another process, as it is by default
    server          vLLM's HTTP server on loopback

Contract: an engine ends with its context. Refuses environments without vLLM.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from logra.errors import ConfigError, LograError
from logra.integrations.vllm import VLLMEngine, VLLMServer, engine_options
from logra.integrations.vllm.client import EngineClient

WAYS = ("in_process", "other_process", "server")
_START_S = 1200.0
_STOP_S = 30.0
_SETTINGS = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 32, "kv_cache_memory_bytes": 2**26}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass(frozen=True)
class Engine:
    """An engine to measure.

    Attributes:
        client: sends it updates and full weights.
        reload: lets vLLM load the checkpoint of a folder with its own `reload_weights`, and empty its prefix cache.
    """

    client: EngineClient
    reload: Callable[[Path], None]


@contextmanager
def engine(way: str, model: Path) -> Iterator[Engine]:
    """An engine with the weights of a folder, in fp32.

    Args:
        way: one of `WAYS`.
        model: folder of the model.

    Raises:
        ConfigError: vLLM is not installed, or another way.
        LograError: the server did not start.
    """
    if way not in WAYS:
        raise ConfigError(f"way={way!r}: one of {', '.join(WAYS)}")
    _require_vllm()
    os.environ.update(_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if way == "in_process" else "1"})
    with _server(model) if way == "server" else _llm(model) as built:
        yield built


@contextmanager
def built_engine(model: Path, **options: Any) -> Iterator[Any]:
    """A `vllm.LLM` with the weights of a folder, in fp32.

    Args:
        model: folder of the model.
        options: of `LLM`, beside and above those of all engines here.

    Raises:
        ConfigError: vLLM is not installed.
    """
    _require_vllm()
    os.environ.update(_ENVIRONMENT)
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    llm: Any = LLM(**{"model": str(model), "dtype": "float32", "enforce_eager": True, **_SETTINGS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def ordinary_engine(model: Path) -> Iterator[Callable[[Path], None]]:
    """An engine as vLLM builds it, without `logra`, in another process (`LLM`'s default); yields its `reload`, see `Engine`.

    Args:
        model: folder of the model.

    Raises:
        ConfigError: vLLM is not installed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with built_engine(model) as llm:
        yield partial(_reload_llm, llm)


@contextmanager
def _llm(model: Path) -> Iterator[Engine]:
    with built_engine(model, **engine_options()) as llm:
        yield Engine(VLLMEngine(llm), partial(_reload_llm, llm))


def _reload_llm(llm: Any, folder: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()


@contextmanager
def _server(model: Path) -> Iterator[Engine]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # `python -m`: the command `vllm` of the CPU build does not start.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    flags = {"host": "127.0.0.1", "port": port, "weight_transfer_config": '{"backend": "logra"}'} | _SETTINGS
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with subprocess.Popen([*command, "--enforce-eager"], stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(url, process)
            yield Engine(VLLMServer(url), lambda folder: _reload(url, folder))
        finally:
            process.terminate()
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here. Run `make test-vllm`, then this benchmark with .venv-vllm/bin/logra"
        )


def _reload(url: str, folder: Path) -> None:
    _post(f"{url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    _post(f"{url}/reset_prefix_cache", {})


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_START_S).close()


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LograError(f"vLLM's server ended with exit code {process.returncode} before it answered")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=10).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise LograError(f"vLLM's server did not answer within {_START_S:.0f} s")
