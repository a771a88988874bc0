"""Sentinels on histories made by hand."""

import math

import pytest

from logra.errors import ConfigError
from logra.rl.guards import sentinels
from logra.rl.guards.config import GuardsConfig, ReferenceReset, Rule, Sentinels
from logra.rl.guards.sentinels import AFTER_THE_MERGE, BEFORE_THE_MERGE, breached, check

ALL = BEFORE_THE_MERGE | AFTER_THE_MERGE


def events(history, config=None, measures=ALL):
    return {event.kind: event for event in check(measures, history, config or Sentinels(), step=7)}


def sound(num_steps=40):
    """A run in which nothing is wrong."""
    return [
        {
            "policy/entropy": 1.0,
            "kl": 0.01,
            "trust/realised_kl": 1e-3,
            "trust/planned_kl": 9e-4,
            "trust/budget": 1e-3,
            "sync/bytes": 100.0,
            "completions/mean_length": 20.0 + step % 3,
            "completions/clipped_ratio": 0.1,
            "guards/repetition": 0.05,
            "guards/effective_samples": 0.9,
            "guards/filtered": 0.3,
            "reward/mean": 0.5 + 0.01 * (step % 5),
            "optim/update_ratio": 1e-4,
        }
        for step in range(num_steps)
    ]


def test_a_sound_run_is_silent():
    assert events(sound()) == {}


def test_every_sentinel_has_a_measure_and_a_rule():
    assert ALL.keys() == Sentinels().rules().keys()


@pytest.mark.parametrize(
    ("kind", "change", "value"),
    [
        ("entropy_floor", {"policy/entropy": 0.001}, 0.001),
        ("reference_kl", {"kl": 1.5}, 1.5),
        ("realised_kl", {"trust/realised_kl": 3e-3, "trust/planned_kl": 3e-3}, 3.0),
        ("length_jump", {"completions/mean_length": 84.0}, 4.0),
        ("length_jump", {"completions/mean_length": 5.25}, 4.0),
        ("truncation", {"completions/clipped_ratio": 1.0}, 1.0),
        ("repetition", {"guards/repetition": 0.6}, 0.6),
        ("effective_samples", {"guards/effective_samples": 0.2}, 0.2),
        ("prediction_error", {"trust/planned_kl": 2e-4}, 5.0),
        ("prediction_error", {"trust/planned_kl": 5e-3}, 5.0),
        ("update_norm", {"optim/update_ratio": 1.2e-3}, 12.0),
    ],
)
def test_one_bad_number_wakes_one_sentinel(kind, change, value):
    history = [*sound(), sound(1)[0] | change]
    found = events(history)
    assert list(found) == [kind]
    assert found[kind].value == pytest.approx(value)
    assert (found[kind].step, found[kind].action) == (7, "warn")
    assert found[kind].threshold == getattr(Sentinels(), kind).threshold


def test_a_reward_drop_is_measured_against_the_spread_of_its_history():
    low = [step | {"reward/mean": 0.40} for step in sound(5)]
    value = events([*sound(), *low])["reward_drop"].value
    rewards = [0.5, 0.51, 0.52, 0.53, 0.54]
    mean = sum(rewards) / 5
    # The spread of these rewards, 0.0141, is below the floor of 5 % of their mean.
    assert value == pytest.approx((mean - 0.40) / (0.05 * mean))
    # Four low steps are no drop yet: the fifth is still as before.
    assert "reward_drop" not in events([*sound(), *low[:1]])


def test_relative_sentinels_wait_for_a_history():
    for num_steps, speaks in ((19, False), (20, True)):
        history = [*sound(num_steps), sound(1)[0] | {"optim/update_ratio": 1.0}]
        assert ("update_norm" in events(history)) == speaks


def test_filtering_must_last_five_steps():
    gone = [step | {"guards/filtered": 1.0} for step in sound(5)]
    assert "filtered" in events([*sound(), *gone])
    assert "filtered" not in events([*sound(), *gone[:4]])
    assert "filtered" not in events([*sound(), *gone[:4], sound(1)[0] | {"guards/filtered": 0.99}])


def test_a_step_that_was_not_taken_says_nothing_of_the_merge():
    rejected = sound(1)[0] | {"trust/realised_kl": 1.0, "sync/bytes": 0.0}
    del rejected["optim/update_ratio"]
    assert events([*sound(), rejected], measures=AFTER_THE_MERGE) == {}


def test_ratios_of_rounding_noise_are_no_prediction_error():
    noise = sound(1)[0] | {"trust/realised_kl": 1e-9, "trust/planned_kl": 1e-12}
    assert "prediction_error" not in events([*sound(), noise])


def test_missing_metrics_are_no_events():
    assert events([{}]) == {}
    assert events([{"reward/mean": math.nan}] * 40) == {}


def test_a_value_that_is_not_a_number_is_on_the_wrong_side():
    assert breached("entropy_floor", math.nan, 0.01) and breached("reference_kl", math.nan, 1.0)


def test_a_sentinel_that_is_off_is_silent():
    config = Sentinels(entropy_floor=Rule(threshold=0.5, action="off"))
    assert events([*sound(), sound(1)[0] | {"policy/entropy": 0.1}], config) == {}


@pytest.mark.parametrize("name", ["realised_kl", "prediction_error", "update_norm"])
def test_what_is_known_after_the_merge_cannot_skip_it(name):
    with pytest.raises(ConfigError, match=f"guards.sentinels.{name}.action='skip'"):
        Sentinels(**{name: Rule(threshold=2.0, action="skip")})


def test_stalled_validations_need_validations():
    with pytest.raises(ConfigError, match=r"guards\.validate_every"):
        GuardsConfig(reference=ReferenceReset(stalled_validations=3))


def test_the_table_of_the_docstring_is_complete():
    assert all(f"    {name} " in (sentinels.__doc__ or "") for name in ALL)
