"""Groups find a worker whatever happens to the workers; what Ray would do is played by hand."""

from collections import deque

import pytest

from logra.errors import SyncError
from logra.integrations.ray.fleet import Answered, Failed, Fleet, Gone, Joined, Lost
from logra.integrations.ray.messages import Answer, Group, Sample

VERSION = 3
GROUPS = [Group(prompt_ids=(index,), num_samples=2, seed=index) for index in range(5)]


def answer(group, version=VERSION, num_samples=None):
    """What a worker of this version draws of a group: token ids that name the group's seed."""
    num_samples = group.num_samples if num_samples is None else num_samples
    return Answer(version, [Sample([group.seed, copy], version) for copy in range(num_samples)], catch_up_s=0.5)


EXPECTED = [[group.seed, copy] for group in GROUPS for copy in range(2)]


class PlayedPool:
    """Answers in the order of submission, except where `faults` has something else for (worker, number of the request).

    A fault is a function of the group that returns an event's maker, or None for silence.
    """

    def __init__(self, num_workers=2, faults=None):
        self.num_workers = num_workers
        self.faults = faults or {}
        self.events = deque()
        self.busy = set()
        self.num_requests = dict.fromkeys(range(num_workers), 0)
        self.rejoined, self.restarted, self.submitted = [], [], []

    def submit(self, worker, groups, version):
        assert worker not in self.busy, "a worker has one request at a time"
        if len(groups) > 1:
            self.submitted.append((worker, [group.seed for group in groups]))
            samples = [sample for group in groups for sample in answer(group).samples]
            self.events.append(Answered(worker, Answer(version, samples, 0.5)))
            return
        (group,) = groups
        self.busy.add(worker)
        number = self.num_requests[worker]
        self.num_requests[worker] += 1
        self.submitted.append((worker, group.seed))
        fault = self.faults.get((worker, number), lambda worker, group: Answered(worker, answer(group)))
        event = fault(worker, group)
        if event is not None:
            self.events.append(event)

    def rejoin(self, worker, version):
        self.rejoined.append((worker, version))
        self.events.append(Joined(worker))

    def restart(self, worker, version):
        self.restarted.append(worker)
        self.busy.discard(worker)
        self.rejoin(worker, version)

    def wait(self, timeout_s):
        if not self.events:
            return None
        event = self.events.popleft()
        self.busy.discard(event.worker)
        return event

    def close(self):
        self.num_workers = 0


def make_fleet(pool, **settings):
    return Fleet(pool, **{"timeout_s": 600.0} | settings)


def drawn(fleet, version=VERSION):
    samples = fleet.sample(GROUPS, version)
    assert all(sample.version == version for sample in samples)
    return [sample.token_ids for sample in samples]


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_samples_come_in_the_order_of_the_groups(num_workers):
    pool = PlayedPool(num_workers)
    fleet = make_fleet(pool)
    assert drawn(fleet) == drawn(fleet) == EXPECTED
    assert len(pool.submitted) == 2 * len(GROUPS)
    assert (fleet.num_refused, fleet.num_lost, fleet.catch_up_s) == (0, 0, 0.5)


@pytest.mark.parametrize(
    ("num_workers", "dealt"), [(2, [[0, 1, 2], [3, 4]]), (4, [[0, 1], [2, 3]]), (1, [[0, 1, 2, 3, 4]])]
)
def test_an_engine_that_batches_gets_its_share_at_once(num_workers, dealt):
    pool = PlayedPool(num_workers)
    assert drawn(make_fleet(pool, in_shares=True)) == EXPECTED
    assert [seeds for _, seeds in pool.submitted if isinstance(seeds, list)] == dealt


def test_the_group_of_a_worker_that_dies_goes_to_the_next():
    """Fails if a group is lost, drawn twice, or waits for the restart while others are free."""
    pool = PlayedPool(faults={(0, 1): lambda worker, group: Lost(worker, "killed")})
    fleet = make_fleet(pool)
    assert drawn(fleet) == EXPECTED
    assert sorted(seed for _, seed in pool.submitted) == [0, 1, 2, 2, 3, 4]
    assert (pool.rejoined, fleet.num_lost, fleet.num_refused) == ([(0, VERSION)], 1, 0)
    assert drawn(fleet) == EXPECTED  # also when the restart ends after the call


def test_a_single_worker_that_dies_is_waited_for():
    fleet = make_fleet(PlayedPool(1, {(0, 2): lambda worker, group: Lost(worker, "killed")}))
    assert drawn(fleet) == EXPECTED


@pytest.mark.parametrize(
    "wrong",
    [
        lambda group: answer(group, VERSION - 1),
        lambda group: answer(group, VERSION - 1, num_samples=0),
        lambda group: Answer(VERSION, [Sample([9], VERSION), Sample([9], VERSION - 1)], 0.0),
    ],
    ids=["stale", "stale-empty", "one-stale"],
)
def test_samples_of_another_version_are_refused_and_drawn_again(wrong):
    """Fails if the version of the answer is trusted in the place of that of every sample."""
    fleet = make_fleet(PlayedPool(faults={(1, 0): lambda worker, group: Answered(worker, wrong(group))}), retry_s=0.0)
    assert drawn(fleet) == EXPECTED
    assert (fleet.num_refused, fleet.num_lost) == (2, 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda worker, group: Answered(worker, answer(group, num_samples=1)),
            "worker 0 drew 1 samples .* and 2 were asked",
        ),
        (lambda worker, group: Failed(worker, "RuntimeError: no", RuntimeError("no")), "worker 0: RuntimeError: no"),
    ],
    ids=["too-few", "failed"],
)
def test_an_error_of_a_worker_is_raised_and_the_fleet_can_be_asked_again(fault, message):
    """Fails if the worker is asked again within the call, or is never asked again afterwards."""
    pool = PlayedPool(1, {(0, 1): fault})
    fleet = make_fleet(pool)
    with pytest.raises(SyncError, match=message):
        fleet.sample(GROUPS, VERSION)
    assert len(pool.submitted) == 2
    assert drawn(fleet) == EXPECTED


def test_errors_of_a_call_that_has_ended_are_no_errors_of_the_next():
    fault = {(worker, 0): lambda worker, group: Failed(worker, "no", RuntimeError("no")) for worker in range(2)}
    pool = PlayedPool(faults=fault)
    fleet = make_fleet(pool)
    with pytest.raises(SyncError, match="worker 0: no"):
        fleet.sample(GROUPS, VERSION)
    assert drawn(fleet) == EXPECTED
    assert {worker for worker, _ in pool.submitted[2:]} == {0, 1}


def test_a_worker_that_is_ahead_starts_again():
    pool = PlayedPool(faults={(0, 0): lambda worker, group: Answered(worker, answer(group, VERSION + 1))})
    fleet = make_fleet(pool)
    assert drawn(fleet) == EXPECTED
    assert (pool.restarted, fleet.num_refused) == ([0], 2)


def test_a_log_that_never_comes_to_the_version_is_an_error():
    stale = {(0, number): lambda worker, group: Answered(worker, answer(group, 1)) for number in range(10000)}
    with pytest.raises(SyncError, match=r"worker 0 is at version 1, and samples of version 3 are wanted"):
        make_fleet(PlayedPool(1, stale), timeout_s=0.01, retry_s=0.005).sample(GROUPS, VERSION)


def test_silent_workers_are_started_again_once():
    pool = PlayedPool(faults={(1, 0): lambda worker, group: None})
    fleet = make_fleet(pool)
    assert drawn(fleet) == EXPECTED
    assert (pool.restarted, fleet.num_lost) == ([1], 1)
    silent = {(worker, number): lambda worker, group: None for worker in range(2) for number in range(3)}
    with pytest.raises(SyncError, match="none of 2 has answered for 5 s, and starting them again did not help"):
        make_fleet(PlayedPool(faults=silent), timeout_s=5.0).sample(GROUPS, VERSION)


def test_a_fleet_works_on_without_those_that_cannot_be_started_again():
    pool = PlayedPool(faults={(0, 1): lambda worker, group: Gone(worker, "no restarts left")})
    fleet = make_fleet(pool)
    assert drawn(fleet) == EXPECTED
    assert drawn(fleet) == EXPECTED
    assert sum(worker == 0 for worker, _ in pool.submitted) == 2
    gone = {(worker, 0): lambda worker, group: Gone(worker, "ValueError: cannot load") for worker in range(2)}
    with pytest.raises(SyncError, match=r"none is left. The last one, worker 1: ValueError: cannot load"):
        make_fleet(PlayedPool(faults=gone)).sample(GROUPS, VERSION)


def test_a_call_that_was_interrupted_leaves_a_fleet_that_works():
    def interrupt(worker, group):
        pool.events.append(Answered(worker, answer(group)))
        raise KeyboardInterrupt

    pool = PlayedPool(1, {(0, 1): interrupt})
    fleet = make_fleet(pool)
    with pytest.raises(KeyboardInterrupt):
        fleet.sample(GROUPS, VERSION)
    assert drawn(fleet) == EXPECTED
