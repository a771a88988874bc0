"""What a number depends on besides the code: machine, threads, versions, commit."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import logra

PACKAGES = ("torch", "transformers", "trl", "peft", "galore-torch", "apollo-torch", "vllm")


def machine() -> dict[str, Any]:
    """CPU, cores, threads, GPU where there is one, and versions."""
    import torch

    record: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
    for package in PACKAGES:
        try:
            record[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return record


def commit() -> tuple[str | None, bool | None]:
    """The commit of the package that runs, and whether it has changes besides; (None, None) outside a checkout."""
    package = Path(logra.__file__).parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    head = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    return (None if head is None else head.strip()), (None if changes is None else bool(changes.strip()))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return done.stdout if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
