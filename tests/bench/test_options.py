"""Options of every benchmark: what cannot be measured is refused before the first cell."""

import dataclasses

import pytest

from logra.bench.harness.benchmark import find, summaries
from logra.errors import ConfigError

MAY_BE_ZERO = {"warm_up_batches", "updates"}


def _cases():
    for name in summaries():
        options = find(name).options
        for field in dataclasses.fields(options):
            several = isinstance(field.default, tuple) and field.default
            number = field.default[0] if several else field.default
            if field.name == "seeds" or isinstance(number, bool) or not isinstance(number, int | float):
                continue  # the runner looks at seeds
            refused = (0, -1) if isinstance(number, int) else (0.0, -1.0, float("nan"), float("inf"))
            for value in refused[field.name in MAY_BE_ZERO :]:
                yield pytest.param(options, {field.name: (value,) if several else value}, id=f"{name}-{field.name}")


@pytest.mark.parametrize(("options", "given"), list(_cases()))
def test_numbers_that_nothing_can_be_measured_with(options, given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        options(**given)
