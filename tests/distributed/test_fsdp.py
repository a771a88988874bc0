"""FSDP2: every process holds rows of the weights, and takes the step that one process would take on all of the data."""

import pytest
from sharded_lm import (
    Model,
    assert_close_to_one_process,
    assert_equal_on_all,
    batch,
    own_part,
    sharded,
    train,
    with_trust,
)

import logra

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def under_fsdp(rank, **settings):
    result = train(sharded(Model()), own_part(batch(), rank), **with_trust(settings))
    logra.distributed.average_(list(result["sketches"].values()))
    return result


CASES = {
    "two_sided": {},
    "one_sided": {"sketch": "one_sided", "side": "auto", "direction": "row_adam", "momentum": 0.0},
    "input_scaling": {"input_scaling": True, "direction": "factored"},
    "coherence": {"coherence_scaling": True},
    "trust": {"trust": True},
}


def all_cases(rank):
    return {name: under_fsdp(rank, **settings) for name, settings in CASES.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp_equals_one_process(world_size, workers, tmp_path):
    results = workers.run(all_cases, world_size, tmp_path)
    for name, settings in CASES.items():
        assert_equal_on_all([result[name] for result in results])
        assert_close_to_one_process([result[name] for result in results], **with_trust(settings))
