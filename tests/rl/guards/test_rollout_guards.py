"""Length penalty, groups, measures and the reference schedule."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from logra.errors import ConfigError
from logra.rl.guards.config import LengthPenalty, ReferenceReset
from logra.rl.guards.groups import SignalCount, num_loss_tokens, replace_rows
from logra.rl.guards.length_penalty import is_on, penalty, with_length_penalty
from logra.rl.guards.measures import effective_share, repetition, weight_sums
from logra.rl.guards.reference import ReferenceSchedule, copy_weights

# ---- length penalty ----


def test_the_penalty_is_half_a_cosine():
    assert penalty(0, weight=2.0, max_length=10) == 0.0
    assert penalty(5, weight=2.0, max_length=10) == pytest.approx(1.0)
    assert penalty(10, weight=2.0, max_length=10) == pytest.approx(2.0)
    assert penalty(50, weight=2.0, max_length=10) == pytest.approx(2.0)
    values = [penalty(length, weight=1.0, max_length=10) for length in range(11)]
    assert values == sorted(values)


def test_the_penalty_holds_at_the_end_of_every_cycle():
    config = LengthPenalty(weight=1.0, cycle_steps=5, on_steps=2)
    assert [is_on(step, config) for step in range(10)] == [False, False, False, True, True] * 2
    assert all(is_on(step, LengthPenalty(weight=1.0, cycle_steps=4, on_steps=4)) for step in range(8))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_reward_loses_the_penalty(asynchronous):
    config, logged = LengthPenalty(weight=1.0, cycle_steps=2, on_steps=1), []

    def reward(completions, **_):
        return [1.0, None]

    async def reward_async(completions, **_):
        return [1.0, None]

    function = with_length_penalty(reward_async if asynchronous else reward, config, max_length=4)
    assert function.__name__ == ("reward_async" if asynchronous else "reward")

    def call(step):
        result = function(
            completions=["a", "b"],
            completion_ids=[[1, 2], [1, 2, 3, 4]],
            trainer_state=SimpleNamespace(global_step=step),
            log_metric=lambda name, value: logged.append((name, value)),
        )
        return asyncio.run(result) if asynchronous else result

    assert call(0) == [1.0, None]
    assert call(1) == [pytest.approx(0.5), None]
    assert logged == [("guards/length_penalty", 0.0), ("guards/length_penalty", pytest.approx(0.75))]


def test_without_weight_the_reward_is_left_alone():
    def reward(**_):
        return []

    assert with_length_penalty(reward, LengthPenalty(), 4) is reward


# ---- groups ----


def batch_of(prompt_width, completion_width, value):
    rows = 4
    return {
        "prompt_ids": torch.full((rows, prompt_width), value),
        "prompt_mask": torch.ones(rows, prompt_width, dtype=torch.long),
        "completion_ids": torch.full((rows, completion_width), value),
        "completion_mask": torch.ones(rows, completion_width, dtype=torch.long),
        "advantages": torch.full((rows,), float(value)),
        "num_items_in_batch": torch.tensor(rows * completion_width),
    }


@pytest.mark.parametrize("wider", [0, 1])
def test_rows_are_replaced_and_padded_on_their_own_side(wider):
    batches = [batch_of(2, 3, 5), batch_of(4, 1, 6)]
    batch, other = batches[wider], batches[1 - wider]
    merged = replace_rows(batch, other, rows=[2, 3], by=[0, 1], pad_token_id=9)
    kept, new = batch["prompt_ids"][0, 0].item(), other["prompt_ids"][0, 0].item()
    narrow_prompt = 5  # the one of two tokens
    for row, value in enumerate([kept, kept, new, new]):
        ids, mask = merged["prompt_ids"][row].tolist(), merged["prompt_mask"][row].tolist()
        assert (ids, mask) == (
            ([9, 9, 5, 5], [0, 0, 1, 1]) if value == narrow_prompt else ([6] * 4, [1] * 4)
        )  # prompts on the left
        ids, mask = merged["completion_ids"][row].tolist(), merged["completion_mask"][row].tolist()
        assert (ids, mask) == (([5] * 3, [1] * 3) if value == 5 else ([6, 9, 9], [1, 0, 0]))  # completions on the right
    assert merged["advantages"].tolist() == [kept, kept, new, new]
    assert num_loss_tokens(merged) == 2 * 3 + 2 * 1
    assert batch["advantages"].tolist() == [kept] * 4  # the argument is left alone


def test_images_are_refused_by_name():
    with pytest.raises(ConfigError, match="pixel_values"):
        replace_rows(batch_of(2, 2, 1) | {"pixel_values": torch.zeros(1)}, batch_of(2, 2, 1), [], [], 0)


def test_the_error_says_what_the_rewards_were():
    count = SignalCount()
    totals = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, math.nan])
    dropped = torch.tensor([False] * 6 + [True] * 2)
    count.add(totals, torch.ones(8, dtype=torch.bool), dropped, 2)
    message = str(count.error(10))
    assert "max_resampled_batches=10: of 4 groups none" in message
    assert "2 with reward 0, 1 with reward 1" in message
    assert "1 dropped for a bad reward" in message


# ---- measures ----


def test_repetition_counts_sequences_seen_before():
    assert repetition([[1, 2, 1, 2, 1, 2]], length=2) == pytest.approx(3 / 5)
    assert repetition([[1] * 10, [1, 2, 3]], length=4) == pytest.approx((6 / 7 + 0) / 2)
    assert repetition([]) == 0.0


def test_effective_sample_size():
    mask = torch.tensor([[1, 1], [1, 0]])
    same = torch.zeros(2, 2)
    assert effective_share(weight_sums(same, same, mask)) == pytest.approx(1.0)
    # Weights 1, 1 and 4: (1 + 1 + 4)² / (3 (1 + 1 + 16)).
    trainer = torch.tensor([[0.0, 0.0], [math.log(4.0), 77.0]])
    assert effective_share(weight_sums(trainer, same, mask)) == pytest.approx(36 / 54)
    # A token that the engine reported nothing for is left out, and masked ones do not count.
    engine = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    assert effective_share(weight_sums(trainer, engine, mask)) == pytest.approx(25 / (2 * 17))
    assert effective_share(weight_sums(same, same, torch.zeros(2, 2))) is None


# ---- reference ----


def test_the_reference_is_reset_every_few_steps_since_the_last_reset():
    schedule = ReferenceSchedule(ReferenceReset(every_steps=10))
    assert schedule.reason(9, None) is None
    assert schedule.reason(10, None) == ("every_steps", 10.0, 10.0)
    schedule.was_reset(10)
    assert schedule.reason(19, None) is None and schedule.reason(20, None) is not None


def test_the_reference_is_reset_on_a_kl_spike():
    schedule = ReferenceSchedule(ReferenceReset(kl_spike=0.5))
    assert schedule.reason(3, 0.5) is None and schedule.reason(3, None) is None
    assert schedule.reason(3, 0.6) == ("kl_spike", 0.6, 0.5)


def test_the_reference_is_reset_when_validation_stalls():
    schedule = ReferenceSchedule(ReferenceReset(stalled_validations=2))
    for score in (0.1, 0.3, 0.3):
        schedule.add_validation(score)
        assert schedule.reason(1, None) is None
    schedule.add_validation(0.2)
    assert schedule.reason(1, None) == ("stalled_validation", 2.0, 2.0)
    schedule.was_reset(1)
    assert schedule.reason(1, None) is None
    schedule.add_validation(0.31)  # the best score is still the one to beat
    assert schedule.num_stalled == 0


def test_the_reference_gets_all_weights_and_stays_apart():
    policy, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    copy_weights(policy, reference)
    assert torch.equal(policy.weight, reference.weight) and torch.equal(policy.bias, reference.bias)
    with torch.no_grad():
        policy.weight.zero_()
    assert reference.weight.any()
    with pytest.raises(ConfigError, match="different models"):
        copy_weights(policy, torch.nn.Linear(2, 2, bias=False))
