"""The speed of whole updates: every method runs, and what is said of the times is true."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from logra.bench import speed
from logra.bench.harness import Results
from logra.bench.harness.results import Record, settings_of
from logra.errors import ConfigError


def results_of(result, options=None):
    cell = {"hidden": 64, "num_responses": 4, "micro_batch_size": 2}
    record = Record(
        cell=cell, result=result, machine={}, commit=None, dirty=None, date=None, command="", jobs=1, wall_s=0.0
    )  # fmt: skip
    return Results("speed", settings_of(options or speed.Options()), [record])


def times(*seconds, first=0.0):
    return {"update_s": list(seconds), "phases_s": {"forward": 1.0}, "first_update_s": first}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
def test_a_cell_times_every_method():
    methods = ("adamw", "lora", *(["galore"] if find_spec("galore_torch") else []), "logra", "paper")
    options = speed.Options(
        hidden=(64,),
        models=(),
        methods=methods,
        rank=4,
        num_responses=(4,),
        micro_batch_sizes=(2,),
        num_tokens=10,
        num_rounds=2,
    )
    (cell,) = speed.cells(options)
    result = speed.run_cell(cell, options)
    assert list(result) == list(methods)
    for method in methods:
        found = result[method]
        assert len(found["update_s"]) == 2
        assert sum(found["phases_s"].values()) == pytest.approx(sum(found["update_s"]) / 2, rel=0.5)
    assert result["logra"]["phases_s"]["probe"] > 0  # the trust region is timed, not left out
    assert "probe" not in result["adamw"]["phases_s"]
    text = speed.table(results_of(result, options))
    assert all(speed.METHODS[method] in text for method in methods)


def test_ratios_are_paired_by_round():
    result = {"adamw": times(2.0, 8.0, 3.0), "logra": times(1.0, 2.0, 1.0), "paper": times(4.0, 4.0, 3.0)}
    assert speed.speedups(result)["logra"] == [2.0, 4.0, 3.0]
    found = speed.ratios(results_of(result))
    assert {name: ratio.value for name, ratio in found.items()} == {
        "logra against adamw, hidden 64, 4 responses by 2": 3.0,
        "paper against adamw, hidden 64, 4 responses by 2": 1.0,
    }


def test_galore_pays_for_its_svds():
    result = {"adamw": times(1.0), "galore": times(1.0, first=201.0)}
    assert speed.speedups(result)["galore"] == [pytest.approx(0.5)]  # 200 s of SVDs in 200 steps


def test_there_is_nothing_to_compare_with_without_adamw():
    with pytest.raises(ConfigError, match="adamw must be among them"):
        speed.Options(methods=("logra",))
    with pytest.raises(ConfigError, match="methods='sgd'"):
        speed.Options(methods=("adamw", "sgd"))


def test_smollm2_is_timed_whole_and_comes_last():
    cells = speed.cells(speed.Options())
    assert cells[-1] == {"model": "SmolLM2-135M", "num_responses": 64, "micro_batch_size": 2}
    results = results_of({"adamw": times(2.0), "logra": times(1.0)})
    whole = replace(results.records[0], cell=cells[-1])
    text = speed.table(Results("speed", results.settings, [whole, *results.records]))
    assert text.index("| hidden 64 | 4 | 2 | dense") < text.index("| SmolLM2-135M | 64 | 2 | dense")
    assert "logra against adamw, SmolLM2-135M, 64 responses by 2" in speed.ratios(
        Results("speed", results.settings, [whole])
    )
    with pytest.raises(ConfigError, match="models='gpt2'"):
        speed.Options(models=("gpt2",))


def test_an_update_is_cut_into_micro_batches_of_the_asked_size():
    options = speed.Options(hidden=(64,), models=(), num_responses=(8, 4), micro_batch_sizes=(4, 1), num_tokens=5)
    cells = speed.cells(options)
    assert [(cell["num_responses"], cell["micro_batch_size"]) for cell in cells] == [(8, 4), (8, 1), (4, 4), (4, 1)]
    for cell in cells:
        batches = speed._batches(cell, options)
        assert [batch.shape for batch in batches] == [(cell["micro_batch_size"], 6)] * len(batches)
        assert sum(len(batch) for batch in batches) == cell["num_responses"]
    with pytest.raises(ConfigError, match="micro_batch_sizes=3: must divide num_responses=8"):
        speed.Options(num_responses=(8,), micro_batch_sizes=(3,))
    with pytest.raises(ConfigError, match="hidden=96: must be a multiple of 64"):
        speed.Options(hidden=(64, 96))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["adamw", "lora", "logra"])
def test_blocks_stand_in_the_middle_of_a_model(method):
    """Fails where dense AdamW is spared the gradient of a block's input, which a block of a model never is spared."""
    options = speed.Options(hidden=(64,), models=(), rank=4, num_responses=(2,), micro_batch_sizes=(2,), num_tokens=5)
    (cell,) = speed.cells(options)
    model = speed._build(method, cell, options).model
    needed = []
    (query,) = [module for name, module in model.named_modules() if name.endswith("q_proj")]
    query.register_forward_hook(lambda module, args, output: needed.append(args[0].requires_grad))
    model(input_ids=speed._batches(cell, options)[0])
    assert needed == [True]
