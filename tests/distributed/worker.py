"""One of the processes that the distributed tests share: runs the tasks that it is told, one after the other.

A task is a function `task(rank, **arguments)` of a test file. The worker says "ready", then reads one JSON object a line,
joins a gloo group of the wanted size, saves what the task returns and answers with a line: "" or the traceback.
"""

import importlib.util
import json
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist


def run(order: dict) -> None:
    spec = importlib.util.spec_from_file_location("task", order["file"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rank, world_size = order["rank"], order["world_size"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{order['port']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=order["timeout_s"]),
    )
    try:
        torch.save(getattr(module, order["task"])(rank, **order["arguments"]), f"{order['folder']}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        error = ""
        try:
            run(json.loads(line))
        except Exception:
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main()
