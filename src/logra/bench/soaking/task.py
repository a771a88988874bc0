"""The task of the soak, as a task file of `logra train`: sums of two-digit numbers, and products by one digit.

The products stay hard for a policy of this size, so that there is something to learn from for thousands of steps. With faults
a reward is NaN now and then, and one whole batch of rewards is poisoned: reversed, and a million times too large.
"""

import os
import random
import zlib
from typing import Any

NAN_SHARE = 0.002
"""Share of completions whose reward is NaN."""
POISONED = 0.3
"""Where in the run lies the step whose rewards are poisoned."""
POISON = -1e6
NUM_STEPS = "LOGRA_SOAK_STEPS"
"""Environment variable with the number of steps of a run with faults; without it there are none."""


def dataset() -> list[dict[str, str]]:
    """All problems, in an order of their own."""
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100)]
    products = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a in range(100) for b in range(10)]
    rows = random.Random(0).sample(sums, 1000) + products
    random.Random(1).shuffle(rows)
    return rows


def reward(completions: list[str], answer: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    """1 for the right number and nothing else; with faults, something else now and then."""
    values = [float(completion.strip() == right) for completion, right in zip(completions, answer, strict=True)]
    num_steps = os.environ.get(NUM_STEPS)
    if trainer_state is None or num_steps is None:
        return values  # the held-out score is measured without faults
    step = trainer_state.global_step
    if step == int(POISONED * int(num_steps)):
        return [POISON * value for value in values]
    # Anything but Python's or torch's generators: a fault must not change what the run draws.
    draws = [zlib.crc32(f"{step}/{row}/{text}".encode()) / 2**32 for row, text in enumerate([*answer])]
    return [float("nan") if draw < NAN_SHARE else value for draw, value in zip(draws, values, strict=True)]
