"""Runs a task in several processes that form a gloo group."""

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

import torch

WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 150
"""Longest run of a task. Collectives inside give up after `TIMEOUT_S`, so that a test fails instead of hanging."""
TIMEOUT_S = 60


class Workers:
    """The process that forks, see worker.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self.answers.get(timeout=LIMIT_S) == "ready"

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))

    def run(
        self, task: Callable[..., Any], world_size: int, folder: Path, *, timeout_s: int = TIMEOUT_S, **arguments: Any
    ) -> list[Any]:
        """What the task returned in each process. Fails if one of them raised, or is left waiting."""
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
            "limit_s": LIMIT_S,
            "arguments": arguments,
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        errors = self.answers.get(timeout=LIMIT_S + 30)
        assert not any(errors), "\n".join(f"process {rank}:\n{error}" for rank, error in enumerate(errors) if error)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
