"""TRL's trainer with `use_vllm=True` sends updates instead of weights, in this process."""

import pytest

from logra.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def test_the_colocated_engine_ends_with_the_trainers_weights(train_with_trl, tools, probe, model_folder, tmp_path):
    trainer = train_with_trl(vllm_mode="colocate")
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    generation = trainer.vllm_generation
    assert [entry["sync/rollout_version"] for entry in steps] == [0, 1, 2]
    assert steps[0]["sync/delivered_bytes"] == 0
    # Catches full weights on the way: 538 MB.
    assert all(0 < entry["sync/delivered_bytes"] < 5e6 for entry in steps[1:])
    assert all(entry["sync/seconds"] > 0 for entry in steps[1:])
    assert all(entry["sync/anchors"] == 0 for entry in steps)
    # The engine samples from what the trainer computes with: the log-probabilities differ by rounding alone.
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in steps)
    generation.sync_weights()
    tools.save(trainer.model, model_folder, tmp_path / "model")
    assert probe.ask(generation.llm) == tools.fresh_answer(probe, tmp_path / "model", settings=SETTINGS)


SETTINGS = (
    '{"distributed_executor_backend": "external_launcher", "max_num_batched_tokens": 4096, '
    '"logprobs_mode": "processed_logprobs", "block_size": null}'
)
"""Of the engine that TRL builds."""


def test_sleep_mode_is_refused_before_anything_loads(train_with_trl):
    with pytest.raises(ConfigError, match="vllm_enable_sleep_mode"):
        train_with_trl(vllm_enable_sleep_mode=True)
