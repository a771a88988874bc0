"""A loss of more than 10 % of a ratio is found, in both directions."""

import math
import re

import pytest

from logra.bench.harness.check import Ratio, best_of, losses, read_baselines, write_baselines
from logra.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "better", "lost"),
    [(1.81, "higher", False), (1.79, "higher", True), (3.0, "higher", False),
     (2.19, "lower", False), (2.21, "lower", True), (1.0, "lower", False)],
)  # fmt: skip
def test_ten_per_cent(value, better, lost):
    assert bool(losses({"x": Ratio(value, better)}, {"x": Ratio(2.0, better)})) == lost


def test_what_is_no_longer_measured_is_a_loss():
    assert losses({}, {"x": Ratio(2.0, "higher")}) == ["x: was not measured; the baseline is 2.000"]


def test_a_ratio_that_is_not_a_number_is_a_loss():
    assert losses({"x": Ratio(math.nan, "higher")}, {"x": Ratio(2.0, "higher")})


@pytest.mark.parametrize(
    ("value", "better", "wrong"),
    [("0", "lower", "value=0"), ("-1.5", "lower", "value=-1.5"), ("NaN", "higher", "value=nan"),
     ("Infinity", "higher", "value=inf"), ('"2"', "higher", "value='2'"), ("true", "higher", "value=True"),
     ("2.0", "hihger", "better='hihger'")],
)  # fmt: skip
def test_a_baseline_that_nothing_can_be_compared_with_is_refused(tmp_path, value, better, wrong):
    path = tmp_path / "toy.json"
    path.write_text(f'{{"speed": {{"value": {value}, "better": "{better}"}}}}')
    with pytest.raises(ConfigError, match=re.escape(f"{path}: 'speed': {wrong}")):
        read_baselines(path)


def test_the_best_of_two_runs_counts():
    first = {"speed": Ratio(1.0, "higher"), "size": Ratio(3.0, "lower")}
    second = {"speed": Ratio(2.0, "higher"), "size": Ratio(4.0, "lower")}
    assert best_of(first, second) == {"speed": Ratio(2.0, "higher"), "size": Ratio(3.0, "lower")}


def test_baselines_are_read_back(tmp_path):
    ratios = {"speed": Ratio(1.25, "higher")}
    write_baselines(tmp_path / "new" / "toy.json", ratios)
    assert read_baselines(tmp_path / "new" / "toy.json") == ratios
    with pytest.raises(ConfigError, match="--save-baseline"):
        read_baselines(tmp_path / "none.json")
