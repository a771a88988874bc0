"""Appends to a log and is killed: a program of its own, so that no process with a test runner in it is forked.

    python kill_writer.py FOLDER points     killed at every call of os.write, os.fsync and os.rename, before and after
    python kill_writer.py FOLDER random     killed 25 times, at random moments after 0 to 3 acknowledgements

Prints one JSON object for each kill: what was acknowledged, and what is there afterwards.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from logra.sync import DirectoryLog, Manifest
from logra.update import PolicyUpdate

RUN_ID = "killed"
START_S = 0.01
"""About what a writer takes to start."""


def update_to(version: int) -> PolicyUpdate:
    value = torch.arange(2000.0) + version
    return PolicyUpdate(version - 1, version, 0, version - 1, {}, {"norm.weight": value}, RUN_ID)


def append_until_killed(folder: Path, acknowledged: int, num_updates: int) -> None:
    """In the child: append, and write a byte to the pipe after every acknowledgement."""
    log = DirectoryLog(folder, Manifest(run_id=RUN_ID, seed=0))
    for version in range(log.latest() + 1, log.latest() + 1 + num_updates):
        log.append(update_to(version))
        os.writev(acknowledged, [b"x"])  # os.write is instrumented


def kill_at(call: int, *, after: bool) -> None:
    """In the child: SIGKILL at the `call`-th system call of interest, just before or just after it."""
    count = 0

    def instrument(original):
        def instrumented(*args):
            nonlocal count
            count += 1
            if count == call and not after:
                if original is write:
                    write(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args)
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return instrumented

    write = os.write
    for name in ("write", "fsync", "rename"):
        setattr(os, name, instrument(getattr(os, name)))


def one_kill(folder: Path, *, call: int = 0, after: bool = False, awaited: int = 0, share: float = 0.0) -> None:
    """Fork a writer, let it be killed, and report.

    Args:
        folder: of the log.
        call: kill at this system call; 0 kills from here.
        after: just after the call, not just before it.
        awaited: acknowledgements to wait for before the kill from here, however busy the machine is.
        share: of the time that one of those took, to wait besides.
    """
    before = DirectoryLog(folder).latest() if (folder / "manifest.json").exists() else 0
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        if call:
            kill_at(call, after=after)
        append_until_killed(folder, write_end, 2 if call else 10**6)
        os._exit(0)
    os.close(write_end)
    acknowledged = before
    if not call:
        start = time.monotonic()
        for _ in range(awaited):
            acknowledged += len(os.read(read_end, 1))
        time.sleep(share * ((time.monotonic() - start) / awaited if awaited else START_S))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while chunk := os.read(read_end, 2**16):
        acknowledged += len(chunk)
    os.close(read_end)
    report = {"killed": os.WIFSIGNALED(status), "before": before, "awaited": awaited, "acknowledged": acknowledged}
    if (folder / "manifest.json").exists():
        log = DirectoryLog(folder)
        good = all(update.digest == update_to(update.version).digest for update in log.read_since(0))
        report |= {"latest": log.latest(), "good": good}
    else:
        report |= {"latest": 0, "good": True}
    print(json.dumps(report), flush=True)


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "points":
        for after in (False, True):
            for call in range(1, 13):  # 4 calls for the manifest, 4 for each of two updates
                one_kill(folder / f"{call}-{after}", call=call, after=after)
                one_kill(folder / f"{call}-{after}", call=99)  # and then a writer that is left alone
        return
    rng = random.Random(0)
    for index in range(25):
        one_kill(folder, awaited=index % 4, share=rng.uniform(0.0, 2.0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
