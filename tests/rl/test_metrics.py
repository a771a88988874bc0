"""What is measured of a run."""

import subprocess
import sys

import torch

from logra.rl.metrics import peak_memory_bytes


def test_the_peak_is_of_the_process_alone_and_stays():
    """Catches ru_maxrss of Linux, which a process inherits from the one that started it: a notebook, a benchmark."""
    before = peak_memory_bytes(torch.device("cpu"))
    held = bytearray(b"x" * (1 << 28))
    after = peak_memory_bytes(torch.device("cpu"))
    assert after >= len(held)
    program = "import torch; from logra.rl.metrics import peak_memory_bytes as peak; print(peak(torch.device('cpu')))"
    more = bytearray(b"x" * (3 << 28))
    child = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert 2**26 < child < len(more)
    del held, more
    assert peak_memory_bytes(torch.device("cpu")) >= after >= before
