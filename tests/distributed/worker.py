"""The process from which the distributed tests fork theirs: torch is imported once for all of them.

A task is a function `task(rank, **arguments)` of a test file. This process says "ready", then reads one JSON object a line.
For each it forks `world_size` processes, which join a gloo group, run the task and save what it returns; the answer is a
line with one traceback (or "") for each of them.
"""

import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import logra  # noqa: F401


def load(file: str):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, "__loaded__"):
        spec.loader.exec_module(module)
        module.__loaded__ = True
    return module


def run(order: dict, rank: int) -> None:
    # As torchrun would have it.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(order["world_size"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order["port"])}
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{order['port']}",
        rank=rank,
        world_size=order["world_size"],
        timeout=timedelta(seconds=order["timeout_s"]),
    )
    task = getattr(load(order["file"]), order["task"])
    torch.save(task(rank, **order["arguments"]), f"{order['folder']}/{rank}.pt")
    dist.destroy_process_group()


def fork(order: dict, rank: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        run(order, rank)
    except BaseException:
        Path(order["folder"], f"{rank}.error").write_text(traceback.format_exc())
    # Without the exit handlers of the process that was forked.
    os._exit(0)


def wait(children: list[int], timeout_s: float) -> list[int]:
    """Numbers of those that did not end in time; they are killed."""
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(children))
    while running and time.monotonic() < deadline:
        running = {rank: child for rank, child in running.items() if os.waitpid(child, os.WNOHANG)[0] == 0}
        time.sleep(0.01)
    for child in running.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return list(running)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        load(order["file"])
        late = wait([fork(order, rank) for rank in range(order["world_size"])], order["limit_s"])
        errors = []
        for rank in range(order["world_size"]):
            file = Path(order["folder"], f"{rank}.error")
            errors.append("still waiting" if rank in late else file.read_text() if file.exists() else "")
        print(json.dumps(errors), file=answers, flush=True)


if __name__ == "__main__":
    main()
