"""`logra bench direction`: cosines of known matrices, gradients of growing batches, tables."""

import pytest
import torch

from logra.bench.direction import Options, accumulate, cells, compare, spread_layers, table, token_counts
from logra.bench.harness import Results
from logra.bench.harness.results import Record
from logra.bench.lab import small_policy
from logra.bench.lab.sampling import Rollout, log_probs
from logra.errors import ConfigError


def test_a_gradient_of_low_rank():
    """Rank 5: two-sided recovery is exact from r = 8 on, best from 5 on, one-sided stays near sqrt(r / width)."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(60, 5, generator=generator) @ torch.randn(5, 40, generator=generator)
    found = compare(gradient, (2, 8, 16, 64), 0, "layer")
    assert found["two_sided"][1:] == pytest.approx([1, 1, None]) and found["two_sided"][0] < 0.9
    assert found["best"][1:3] == pytest.approx([1, 1])
    s = torch.linalg.svdvals(gradient).square()
    assert found["best"][0] == pytest.approx((s[:2].sum() / s.sum()).sqrt().item(), rel=1e-5)
    assert 0.1 < found["one_sided"][1] < found["one_sided"][2] < 0.9
    assert found["one_sided"][3] is None  # wider than the matrix
    assert found["rank_99"] <= 5
    assert compare(torch.zeros(4, 4), (2,), 0, "layer")["rank_99"] is None


def test_gradients_add_up_over_rollouts():
    """At every stop the gradient is that of all completions so far, and nothing else of the model has one."""
    torch.manual_seed(0)
    model = small_policy.new_model()
    model.requires_grad_(True)

    def roll_out(seed):
        rollout = small_policy.roll_out(model, torch.Generator().manual_seed(seed), num_prompts=4, num_samples=8)
        rewards = torch.rand(32, generator=torch.Generator().manual_seed(seed))
        return Rollout(rollout.input_ids, rollout.attention_mask, rollout.generated, rewards, 8)

    rollouts = [roll_out(seed) for seed in range(2)]
    tokens = [int(rollout.attention_mask.sum()) for rollout in rollouts]
    layers = dict(list(spread_layers(model, 1).items())[:2])
    stops = [(count, {name: layer.weight.grad.clone() for name, layer in layers.items()})
             for count, _ in accumulate(model, layers, iter(rollouts), [tokens[0], sum(tokens)])]  # fmt: skip
    assert [count for count, _ in stops] == [tokens[0], sum(tokens)]
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 2
    total = 0
    for rollout, (_, gradients) in zip(rollouts, stops, strict=True):
        total = total - (rollout.advantages()[:, None] * log_probs(model, rollout, slice(0, 32), 1.0)).sum()
        expected = torch.autograd.grad(total, [layer.weight for layer in layers.values()], retain_graph=True)
        for gradient, reference in zip(gradients.values(), expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_options_and_cells():
    assert cells(Options(updates=(0, 3))) == [{"updates": 0}, {"updates": 3}]
    assert token_counts(8192) == [512, 2048, 8192] and token_counts(8191) == [512, 2048]
    for wrong in ({"max_tokens": 100}, {"layers_per_kind": 0}, {"updates": (-1,)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)


def test_table():
    cosines = {"one_sided": [0.1] * 6, "two_sided": [0.5] * 5 + [None], "best": [0.9] * 6, "rank_99": 12}
    rows = [
        {"num_tokens": count, "reward": 0.2, "layer": "a.q_proj", "kind": "q_proj"} | cosines for count in (512, 2048)
    ]
    rows.append({"num_tokens": 2048, "reward": 0.2, "layer": "b.q_proj", "kind": "q_proj", "one_sided": [],
                 "two_sided": [], "best": [], "rank_99": None})  # fmt: skip
    record = Record(cell={"updates": 0}, result={"rows": rows}, machine={}, commit=None, dirty=None, date=None,
                    command="", jobs=None, wall_s=None)  # fmt: skip
    text = table(Results("direction", {}, [record]))
    assert "2,048 tokens, after 0 updates" in text
    assert "| q_proj | 0.10 / 0.50 / 0.90 |" in text and "| 0.10 / - / 0.90 | 12 |" in text
    assert "| 0 | 0.20 | 512 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | - | 12 |" in text
