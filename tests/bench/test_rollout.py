"""Speed of rollouts: what is counted, and what the table says of it."""

import pytest
import torch

from logra.bench import rollout
from logra.bench.harness import Results
from logra.bench.harness.results import Record
from logra.errors import ConfigError


def test_ways_take_turns_and_the_first_of_each_is_not_counted():
    calls = []

    def way(name):
        return lambda prompts, num_new: calls.append(name) or len(prompts) * rollout.NUM_SAMPLES * num_new

    found = rollout.measure({"a": way("a"), "b": way("b")}, torch.zeros(2, 3, dtype=torch.int64), 5, num_repeats=2)
    assert calls == ["a", "b"] * 3
    assert {name: len(seconds) for name, seconds in found.items()} == {"a_s": 2, "a_cpu_s": 2, "b_s": 2, "b_cpu_s": 2}


def test_a_rollout_that_ends_early_is_an_error():
    # Catches a speed that is due to completions which were cut short.
    with pytest.raises(RuntimeError, match="a: 79 tokens instead of 80"):
        rollout.measure({"a": lambda *_: 79}, torch.zeros(2, 3, dtype=torch.int64), 5, num_repeats=1)


def test_the_table_divides_medians():
    result = {"transformers_s": [4.0, 2.0, 3.0], "shared_s": [1.0, 2.0, 1.5], "num_tokens": 768}
    record = Record(
        cell={"way": "shared", "shape": "default"}, result=result, machine={}, commit=None, dirty=None, date=None,
        command="", jobs=1, wall_s=0.0,
    )  # fmt: skip
    text = rollout.table(Results("rollout", {}, [record]))
    assert "| 36 + 12 | each prompt run once for its completions | 256 | 512 | 2.00 (1.00-4.00) |" in text


@pytest.mark.parametrize("options", [{"shapes": ("wide",)}, {"ways": ("telepathy",)}, {"num_repeats": 0}])
def test_options_that_are_not_allowed(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name}="):
        rollout.Options(**options)
