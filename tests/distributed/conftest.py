"""Processes that the distributed tests share: importing torch anew for every test would take most of their time."""

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("worker.py")
ANSWER_S = 150
"""Longest wait for a task. Collectives inside give up after `TIMEOUT_S`, so that a test fails instead of hanging."""
TIMEOUT_S = 60


class Worker:
    """A process and the lines that it answers with."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Workers:
    """Runs a task in several processes at once."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def run(
        self, task: Callable[..., Any], world_size: int, folder: Path, *, timeout_s: int = TIMEOUT_S, **arguments: Any
    ) -> list[Any]:
        """What the task returned in each process. Fails if one of them raised, or is left waiting."""
        new = [Worker() for _ in range(world_size - len(self.workers))]
        self.workers += new
        for worker in new:  # a busy machine imports torch for longer than the others may wait for a process to join
            assert worker.answers.get(timeout=ANSWER_S) == "ready"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        order = {
            "file": task.__code__.co_filename,
            "task": task.__name__,
            "world_size": world_size,
            "port": port,
            "folder": str(folder),
            "timeout_s": timeout_s,
            "arguments": arguments,
        }
        for rank, worker in enumerate(self.workers[:world_size]):
            worker.process.stdin.write(json.dumps(order | {"rank": rank}) + "\n")
            worker.process.stdin.flush()
        try:
            errors = [worker.answers.get(timeout=ANSWER_S) for worker in self.workers[:world_size]]
        except queue.Empty:
            self.stop()
            pytest.fail(f"{task.__name__}: a process is still waiting after {ANSWER_S} s")
        assert not any(errors), "\n".join(f"process {rank}:\n{error}" for rank, error in enumerate(errors) if error)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []


@pytest.fixture(scope="session")
def workers():
    """Processes that stay for the whole session."""
    started = Workers()
    yield started
    started.stop()
