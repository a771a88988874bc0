"""What an error of Ray means for a worker; Ray is played."""

import pytest

from logra.integrations.ray.fleet import Failed, Lost
from logra.integrations.ray.pool import RayPool

ray = pytest.importorskip("ray")  # not in the environment of `make test-vllm`
exceptions = ray.exceptions


@pytest.fixture
def event_of(monkeypatch):
    def event_of(error, joins=False):
        def get(ref):
            raise error

        pool = RayPool.__new__(RayPool)
        pool._waiting_for = {"ref": (3, joins)}
        monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
        monkeypatch.setattr(ray, "get", get)
        event = pool.wait(1.0)
        assert pool._waiting_for == {}
        return event

    return event_of


@pytest.mark.parametrize(
    "error",
    [
        exceptions.OutOfMemoryError("killed by the memory monitor"),
        exceptions.NodeDiedError("the node is gone"),
        exceptions.ObjectLostError("00", "", ""),
        exceptions.OwnerDiedError("00", "", ""),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("joins", [False, True])
def test_what_a_restart_helps_loses_the_worker(event_of, error, joins):
    event = event_of(error, joins)
    assert isinstance(event, Lost)
    assert event.worker == 3
    assert event.reason.startswith(type(error).__name__)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.LocalRayletDiedError(),
        exceptions.ActorUnschedulableError("no such node"),
        exceptions.RayError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_of_ray_are_named(event_of, error):
    event = event_of(error)
    assert isinstance(event, Failed)
    assert (event.worker, event.error) == (3, error)
    assert event.reason.startswith(f"{type(error).__name__}: ")
