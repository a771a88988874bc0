"""What `Guards` decides from the events of a step, and what it remembers."""

import json

import pytest

from logra.rl.guards.config import GuardsConfig, Rollback, Rule, Sentinels
from logra.rl.guards.watch import Guards

GOOD, BAD = {"policy/entropy": 1.0, "optim/update_ratio": 1e-4}, {"policy/entropy": 0.0}


def make(action="rollback", **rollback) -> Guards:
    return Guards(
        GuardsConfig(
            sentinels=Sentinels(entropy_floor=Rule(threshold=0.1, action=action)),
            rollback=Rollback(**({"lag": 2} | rollback)),
        )
    )


def run_step(guards, step, metrics, version=None) -> tuple[bool, str]:
    skips = guards.before_merge(step, metrics)
    guards.after_merge(step, metrics)
    guards.end_step(step if version is None else version)
    return skips, guards.verdict()


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("off", (False, "go on")),
        ("warn", (False, "go on")),
        ("skip", (True, "go on")),
        ("rollback", (True, "rollback")),
        ("stop", (False, "stop")),
    ],
)
def test_the_action_decides(action, expected):
    guards = make(action)
    assert run_step(guards, 1, GOOD) == (False, "go on")
    assert run_step(guards, 2, BAD) == expected
    assert run_step(guards, 3, GOOD) == (False, "go on")  # a verdict is of one step


def test_the_good_version_is_sound_and_old_enough():
    guards = make()
    guards.begin(0)
    for step in range(1, 7):
        run_step(guards, step, BAD if step == 4 else GOOD)
    # Versions 5 and 6 are too young, and in step 4 the sentinel spoke.
    assert guards.good_version() == 3
    guards.rolled_back(6, to_version=3, as_version=7)
    assert guards.good_version() == 7  # nothing else is known to be good


def test_without_a_sound_version_the_run_returns_to_its_start():
    guards = make()
    guards.begin(10)
    for step in range(1, 5):
        run_step(guards, step, BAD, version=10 + step)
    assert guards.good_version() == 10


def test_rollbacks_shrink_the_budget_and_end():
    guards = make(max_rollbacks=2, budget_factor=0.5)
    for step in (1, 2):
        assert run_step(guards, step, BAD)[1] == "rollback"
        guards.rolled_back(step, to_version=0, as_version=step + 1)
    assert guards.budget_scale == 0.25
    assert run_step(guards, 3, BAD)[1] == "stop"


def test_a_rollback_forgets_the_history_that_it_gave_up():
    guards = make()
    for step in range(30):
        run_step(guards, step, GOOD)
    guards.rolled_back(30, to_version=3, as_version=31)
    # A step 100 times as long would be an update_norm event, were the old steps still compared with.
    run_step(guards, 31, GOOD | {"optim/update_ratio": 1e-2})
    assert guards.counts["update_norm"] == 0


def test_events_reach_subscribers_and_are_counted():
    guards, seen = make("warn"), []
    guards.subscribe(seen.append)
    run_step(guards, 1, BAD)
    run_step(guards, 2, BAD)
    assert [(event.step, event.kind, event.action) for event in seen] == [
        (1, "entropy_floor", "warn"),
        (2, "entropy_floor", "warn"),
    ]
    assert guards.metrics() == {"guards/events": 2.0, "guards/entropy_floor_events": 2.0}


def test_the_state_survives_json():
    first, second = make(), make()
    first.begin(0)
    for step in range(1, 9):
        run_step(first, step, BAD if step == 5 else GOOD)
    first.rolled_back(8, to_version=4, as_version=9)
    first.reference.add_validation(0.5)
    run_step(first, 9, GOOD, version=10)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert second.budget_scale == 0.5 and second.num_rollbacks == 1 and second.reference.best_score == 0.5
