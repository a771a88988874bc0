"""The lab's loop: equal KL for every arm, and a gain that is right where it can be counted."""

from dataclasses import replace

import pytest
import torch

from logra.bench.lab import small_policy
from logra.bench.lab.arms import Arm
from logra.bench.lab.axes import ARMS, AXES, DEFAULT
from logra.bench.lab.equal_kl import equal_kl
from logra.bench.lab.loop import Setting, run_arm
from logra.bench.lab.sampling import Rollout, log_probs, sample
from logra.optim import Config, input_scaling
from logra.sketch.accumulate import SketchSpec


def untrained(seed: int = 0):
    torch.manual_seed(seed)
    return small_policy.new_model().eval()


def setting(num_steps: int = 2) -> Setting:
    def roll_out(model, step):
        rollout = small_policy.roll_out(model, torch.Generator().manual_seed(step), num_prompts=4, num_samples=8)
        # An untrained model is never right: reward the share of even digits instead.
        completions = rollout.input_ids[:, -rollout.generated.shape[1] :]
        rewards = ((completions % 2 == 0) * rollout.generated).sum(1) / rollout.generated.sum(1)
        return Rollout(rollout.input_ids, rollout.attention_mask, rollout.generated, rewards, 8)

    return Setting(num_steps=num_steps, temperature=1.0, micro_batch=32, roll_out=roll_out,
                   unrelated=small_policy.unrelated_text())  # fmt: skip


@pytest.mark.parametrize("name", ["dense-adamw", "dense-spectral-m", "row-adam-scaled-32", "spectral-16-m"])
def test_every_arm_realises_the_same_kl(name):
    curves = run_arm(untrained(), ARMS[name], setting(), trust=equal_kl(0.02), seed=0)
    assert curves["realised_kl"] == pytest.approx([0.02, 0.02], rel=0.1)
    assert len(curves["reward"]) == 3
    assert all(value is not None and value > 0 for value in curves["collateral_kl"])


def test_gain_is_the_difference_of_expected_rewards(monkeypatch):
    """One sampled token: both expectations can be summed over the vocabulary, for the gradient's own prompts.

    With 4,000 samples a prompt the estimate has a standard error of about 0.004; a wrong sign or the weights of the
    wrong policy would miss by twice the gain, which is above 0.03.
    """
    model = untrained()
    prompts = [small_policy.encode("12+34="), small_policy.encode("99+01=")]

    def expected(policy):
        with torch.no_grad():
            p = policy(input_ids=torch.tensor(prompts)).logits[:, -1].softmax(-1)
        return p[:, 1].mean().item()  # reward 1 for the token "1"

    values = []

    def roll_out(policy, step):
        values.append(expected(policy))
        ids, mask, generated = sample(policy, prompts, num_samples=4000, max_new_tokens=1, end_id=small_policy.END,
                                      temperature=1.0, generator=torch.Generator().manual_seed(step))  # fmt: skip
        return Rollout(ids, mask, generated, (ids[:, -1] == 1).float(), 4000)

    one = Setting(num_steps=1, temperature=1.0, micro_batch=8000, roll_out=roll_out,
                  unrelated=small_policy.unrelated_text())  # fmt: skip
    curves = run_arm(model, ARMS["spectral-16"], one, trust=equal_kl(0.05), seed=0)
    assert values[1] - values[0] > 0.03
    assert curves["gain"] == pytest.approx([values[1] - values[0]], abs=0.015)


def test_sampled_tokens_have_the_log_probabilities_of_a_plain_forward():
    """Prompts of different lengths, one completion cut short by the end token. Catches positions and masks off by one."""
    model = untrained()
    prompts = [small_policy.encode("1+2="), small_policy.encode("12+34=")]
    ids, mask, generated = sample(model, prompts, num_samples=3, max_new_tokens=4, end_id=small_policy.END,
                                  temperature=1.0, generator=torch.Generator().manual_seed(1))  # fmt: skip
    rollout = Rollout(ids, mask, generated, torch.zeros(6), 3)
    values = log_probs(model, rollout, slice(0, 6), 1.0)
    for row in range(6):
        real = ids[row][mask[row].bool()][None]
        with torch.no_grad():
            expected = model(input_ids=real).logits[0, :-1].log_softmax(-1).gather(1, real[0, 1:, None])[:, 0]
        count = int(generated[row].sum())
        torch.testing.assert_close(values[row, :count], expected[-count:], rtol=1e-4, atol=1e-5)
        assert not values[row, count:].any()


def test_steps_between_the_measured_ones_are_the_same_and_leave_gaps():
    every, third = (run_arm(untrained(), ARMS[DEFAULT], replace(setting(4), measure_every=n), trust=equal_kl(0.02), seed=0)
                    for n in (1, 3))  # fmt: skip
    assert third["reward"] == every["reward"] and third["realised_kl"] == every["realised_kl"]
    for name in ("gain", "collateral_kl"):
        assert third[name] == [every[name][0], None, None, every[name][3]], name


def test_the_default_arm_has_the_defaults_of_the_library():
    """But for input scaling. Fails when a default changes: the arm, or what the axes call the default, then has to follow."""
    assert Config(**ARMS[DEFAULT].settings) == Config(input_scaling=False)
    assert not ARMS[DEFAULT].constants
    for axis, values in AXES.items():
        is_default = axis != "input scaling"
        assert [label for label, name in values.items() if name == DEFAULT and ("(default)" in label) == is_default], (
            axis
        )


@pytest.mark.parametrize("name", dict.fromkeys(name for values in AXES.values() for name in values.values()))
def test_every_arm_can_be_built(name):
    """A setting that the library refuses, or a constant that it does not have, would end a cell."""
    with ARMS[name].in_force():
        ARMS[name].build(untrained(), equal_kl(0.02), 0)


def test_constants_hold_while_an_arm_runs_and_not_after():
    spec = SketchSpec(rank=4, two_sided=True, seed=0)
    with ARMS["l-3"].in_force(), ARMS["scaled-clamp-2"].in_force():
        assert spec.rank_out == 12
        assert input_scaling.exponents(torch.tensor([1.0, 1.0, 2.0**-40])).tolist() == [0, 0, 2]
    assert spec.rank_out == 8
    assert input_scaling.exponents(torch.tensor([1.0, 1.0, 2.0**-40])).tolist() == [0, 0, 4]
    with pytest.raises(AttributeError), Arm(constants={"logra.optim.input_scaling.NO_SUCH": 1}).in_force():
        pass


def test_expected_accuracy_is_that_of_samples():
    """Four sums of a policy that has learned a little of them; 20,000 samples have a standard error of 0.003."""
    sums = small_policy.Sums(4, lambda a, b: a < 2)
    model = untrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids, targets = small_policy._supervised_batch(generator, 32, sums)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        ).backward()
        optimizer.step()
    for heldout in (False, True):
        expected = small_policy.expected_accuracy(model, sums, heldout=heldout)
        rollout = small_policy.roll_out(model, generator, sums, num_prompts=2000, num_samples=10, heldout=heldout)
        assert 0.02 < expected < 0.98
        assert rollout.rewards.mean().item() == pytest.approx(expected, abs=0.02)


def test_pretrained_weights_come_from_the_cache_the_second_time(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_CACHE", str(tmp_path))
    made = []

    def pretrain(seed, sums):
        made.append((seed, sums.num_terms))
        return {"weight": torch.full((2,), float(seed))}

    monkeypatch.setattr(small_policy, "_pretrain", pretrain)
    for seed, sums in (
        (1, small_policy.TWENTY),
        (1, small_policy.TWENTY),
        (2, small_policy.TWENTY),
        (1, small_policy.TWO_DIGITS),
    ):
        assert small_policy.pretrained_state(seed, sums)["weight"].tolist() == [seed, seed]
    assert made == [(1, 20), (2, 20), (1, 100)]
