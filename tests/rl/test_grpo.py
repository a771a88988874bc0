"""The trainer that all methods share: rewards, advantages, log-probabilities, metrics."""

import math

import pytest
import torch
import trl
from datasets import Dataset

from logra.errors import DataError
from logra.rl import GRPOTrainer
from logra.rl.grpo import CheckedGRPOTrainer


@pytest.fixture
def make_trainer(model, tokenizer, dataset, make_args):
    def make(reward, *, rows=None, **overrides):
        return CheckedGRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=make_args(**overrides),
            train_dataset=dataset if rows is None else rows,
            processing_class=tokenizer,
        )

    return make


def run(trainer):
    """Train, and return the advantages of every rollout and the logs of every step."""
    advantages = []
    original = trainer._generate_and_score_completions

    def spy(inputs):
        batch = original(inputs)
        advantages.append(batch["advantages"].clone())
        return batch

    trainer._generate_and_score_completions = spy
    trainer.train()
    return advantages, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero_advantage(make_trainer, scale_rewards):
    # The mean of 0.35 is not 0.35 in fp32; TRL divides the difference by a spread of nearly 0.
    def constant(completions, **_):
        return [0.35] * len(completions)

    advantages, logs = run(make_trainer(constant, scale_rewards=scale_rewards))
    assert all((a == 0).all() for a in advantages)
    assert [entry["reward/frac_zero_std"] for entry in logs] == [1.0, 1.0]
    assert logs[0]["reward/mean"] == pytest.approx(0.35)
    assert logs[0]["loss"] == 0.0


def test_a_group_with_spread_keeps_its_advantages(make_trainer):
    def half_constant(completions, prompts, **_):
        # The first group of a batch is constant, the second is not.
        return [0.35] * 4 + [0.0, 1.0, 0.0, 1.0]

    advantages, logs = run(make_trainer(half_constant, max_steps=1))
    # TRL: (r - mean) / (std + 1e-4), unbiased std of [0, 1, 0, 1] = sqrt(1/3).
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages[0][:4].tolist() == [0, 0, 0, 0]
    assert advantages[0][4:].tolist() == pytest.approx([-expected, expected, -expected, expected], rel=1e-5)
    assert logs[0]["reward/frac_zero_std"] == 0.5
    assert logs[0]["reward/mean"] == pytest.approx((4 * 0.35 + 2) / 8)


def test_weighted_sums_that_differ_only_by_rounding_are_equal(make_trainer):
    def first(completions, **_):
        return [0.1, 0.2, 0.3, 0.1] * (len(completions) // 4)

    def second(completions, **_):
        return [0.3, 0.2, 0.1, 0.3] * (len(completions) // 4)

    advantages, _ = run(make_trainer([first, second], reward_weights=[0.7, 0.7], max_steps=1))
    assert (advantages[0] == 0).all()


def test_a_row_without_reward_is_dropped(make_trainer):
    def some_none(completions, **_):
        return [None, 1.0, 0.0, 1.0] * (len(completions) // 4)

    advantages, logs = run(make_trainer(some_none, max_steps=1))
    assert advantages[0][0] == 0
    assert advantages[0][1] > 0 > advantages[0][2]
    assert logs[0]["reward/mean"] == pytest.approx(2 / 3)  # over the rows that were scored


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([math.inf] * 8, "must be finite"),
        ([1.0] * 7, "7 rewards for 8 completions"),
        ([math.nan] * 8, "must be finite"),
    ],
)
def test_unusable_rewards_stop_the_run_and_name_the_function(make_trainer, values, message):
    def broken_reward(completions, **_):
        return values

    with pytest.raises(DataError, match="'broken_reward'") as caught:
        make_trainer(broken_reward).train()
    assert message in str(caught.value)


def test_async_rewards_work(make_trainer):
    async def later(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    _, logs = run(make_trainer(later, max_steps=1))
    assert logs[0]["reward/mean"] == 0.5


def test_an_empty_dataset_is_an_error(make_trainer, tokenizer):
    # TRL would train zero steps and report success.
    with pytest.raises(DataError, match="no rows"):
        make_trainer(lambda completions, **_: [0.0], rows=Dataset.from_dict({"prompt": []}))


def test_fewer_rows_than_a_generation_takes_are_an_error_before_the_model_loads(make_args):
    # TRL drops the incomplete batch: zero steps, reported as success.
    rows = Dataset.from_dict({"prompt": ["a", "b", "c"]})
    args = make_args(gradient_accumulation_steps=4)  # 4 x 4 completions, 4 of each prompt
    for trainer_class in (CheckedGRPOTrainer, GRPOTrainer):
        with pytest.raises(DataError, match=r"has 3 rows, but one generation takes 4 prompts"):
            trainer_class(model="never-loaded", reward_funcs=[], args=args, train_dataset=rows)


def test_exactly_enough_rows_train(make_trainer):
    _, logs = run(make_trainer(lambda completions, **_: [0.0] * len(completions), rows=Dataset.from_dict(
        {"prompt": ["1 +", "2 +"]}), max_steps=1))  # fmt: skip
    assert len(logs) == 1


def test_a_stream_of_unknown_length_is_not_counted(make_trainer):
    rows = Dataset.from_dict({"prompt": ["1 +", "2 +"]}).to_iterable_dataset()
    _, logs = run(make_trainer(lambda completions, **_: [0.0] * len(completions), rows=rows, max_steps=1))
    assert len(logs) == 1


def test_log_probabilities_agree_with_trl(make_trainer, tokenizer):
    def zero(completions, **_):
        return [0.0] * len(completions)

    trainer = make_trainer(zero, temperature=0.8)
    torch.manual_seed(0)
    ids = torch.randint(2, len(tokenizer), (3, 10))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[2, -2:] = 0
    arguments = (trainer.model, ids, mask, 4)
    found = trainer._get_per_token_logps_and_entropies(*arguments, compute_entropy=True)
    expected = trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, *arguments, compute_entropy=True)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        # Two orders of summation in fp32.
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_the_metrics_of_a_step(make_trainer):
    def spread(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    _, logs = run(make_trainer(spread))
    names = {
        "reward/mean", "reward/std", "reward/frac_zero_std", "policy/entropy", "time/rollout_s", "time/update_s",
        "memory/peak_bytes", "optim/grad_norm",
    }  # fmt: skip
    for entry in logs:
        assert names <= entry.keys()
        assert entry["reward/mean"] == 0.5
        assert entry["reward/std"] == 0.5
        assert 0 < entry["policy/entropy"] == entry["entropy"] < math.log(73)  # nats, 73 tokens
        assert entry["time/rollout_s"] > 0
        assert entry["time/update_s"] > 0
        assert entry["memory/peak_bytes"] > 2**26
        assert entry["optim/grad_norm"] > 0


def test_samples_come_from_as_many_groups_as_possible(make_trainer):
    def spread(completions, **_):
        return [float(i) for i in range(len(completions))]

    trainer = make_trainer(spread, max_steps=1)
    trainer.train()
    samples = trainer.spread_samples(2)
    assert [reward for _, _, reward in samples] == [0.0, 4.0]
    assert samples[0][0] != samples[1][0]
    assert len(trainer.spread_samples(100)) == 8
    assert trainer.spread_samples(0) == []


def test_evaluation_has_metrics_of_its_own(model, tokenizer, dataset, make_args):
    def spread(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    trainer = CheckedGRPOTrainer(
        model=model,
        reward_funcs=spread,
        args=make_args(per_device_eval_batch_size=4, num_generations_eval=2),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(4)),
        processing_class=tokenizer,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward/mean"] == 0.5
    assert metrics["eval_reward/frac_zero_std"] == 0.0
    assert metrics["eval_policy/entropy"] > 0
