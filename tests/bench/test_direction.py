"""`logra bench direction`: cosines of known matrices, gradients of growing batches, tables."""

from pathlib import Path

import pytest
import torch

from logra.bench.direction import Options, accumulate, cells, compare, spread_layers, table, token_counts
from logra.bench.harness import Results
from logra.bench.harness.results import Record, open_results, read
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


@pytest.mark.parametrize(("per_kind", "depths"), [(1, [2]), (2, [1, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_layers_are_spread_over_depth(per_kind, depths):
    """Also when more are asked for than there are."""
    blocks = torch.nn.ModuleList(torch.nn.ModuleDict({"q_proj": torch.nn.Linear(1, 1)}) for _ in range(4))
    assert list(spread_layers(blocks, per_kind)) == [f"{depth}.q_proj" for depth in depths]


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
    assert cells(Options(updates=(0, 3), seeds=(5, 6))) == [
        {"updates": 0, "seed": 5}, {"updates": 0, "seed": 6}, {"updates": 3, "seed": 5}, {"updates": 3, "seed": 6}
    ]  # fmt: skip
    assert token_counts(8192) == [512, 2048, 8192] and token_counts(8191) == [512, 2048, 8191]
    assert token_counts(65536) == [512, 2048, 8192, 32768, 65536] and token_counts(512) == [512]
    for wrong in ({"max_tokens": 100}, {"layers_per_kind": 0}, {"updates": (-1,)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)


def row(num_tokens, two_sided, rank_99, reward=0.2, layer="a.q_proj"):
    cosines = {"one_sided": [0.1] * 6, "two_sided": [two_sided] * 5 + [None], "best": [0.9] * 6, "rank_99": rank_99}
    if rank_99 is None:  # no gradient
        cosines |= {"one_sided": [], "two_sided": [], "best": []}
    return {"num_tokens": num_tokens, "reward": reward, "layer": layer, "kind": layer.rpartition(".")[2]} | cosines


def results_of(rows_by_cell):
    records = [
        Record(cell={"updates": updates, "seed": seed}, result={"rows": rows}, machine={}, commit=None, dirty=None,
               date=None, command="", jobs=None, wall_s=None)
        for (updates, seed), rows in rows_by_cell.items()
    ]  # fmt: skip
    return Results("direction", {"max_tokens": 2048}, records)


def test_table_of_one_seed():
    rows = [row(520, 0.5, 12), row(2100, 0.5, 12), row(2100, 0.5, None, layer="b.q_proj")]
    text = table(results_of({(0, 0): rows}))
    assert "2,100 tokens, after 0 updates, 1 seed:" in text
    assert "| q_proj | 0.10 / 0.50 / 0.90 |" in text and "| 0.10 / - / 0.90 | 12 |" in text
    assert "| 0 | 1 | 0.20 | 520 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | - | 12 |" in text


def test_tables_are_means_over_seeds():
    """Batches of one size belong together, though no two have the same tokens. A seed counts once, however many of its
    layers have a gradient, and one without any does not count.
    """
    rows = {
        (0, 0): [row(600, 0.5, None), row(2048, 0.4, 10, 0.1), row(2048, 0.6, 20, 0.1, "b.up_proj")],
        (0, 1): [row(700, 0.9, 30), row(2148, 0.8, 40, 0.3), row(2148, 0.8, None, 0.3, "b.up_proj")],
        (8, 0): [row(512, 0.5, 12), row(2048, 0.7, 12)],
    }
    text = table(results_of(rows))
    assert "2,098 tokens, after 0 updates, 2 seeds:" in text
    assert "| q_proj | 0.10 / 0.60 / 0.90 |" in text and "| 0.10 / - / 0.90 | 25 (10-40) |" in text
    assert "| up_proj | 0.10 / 0.60 / 0.90 |" in text and "| 0.10 / - / 0.90 | 20 |" in text
    lines = text.splitlines()[-4:]
    assert lines[0].startswith("| 0 | 1 | 0.20 | 650 | 0.90 |") and lines[0].endswith("| - | 30 |")
    assert lines[1].startswith("| 0 | 2 | 0.20 (0.10-0.30) | 2,098 | 0.65 (0.50-0.80) |")
    assert lines[1].endswith("| - | 28 (15-40) |")
    assert lines[2].startswith("| 8 | 1 | 0.20 | 512 | 0.50 |") and lines[3].startswith(
        "| 8 | 1 | 0.20 | 2,048 | 0.70 |"
    )


def test_the_results_that_are_kept_are_cells_of_these_options():
    """Fails for a file whose cells would be run again, or be refused as of another setting."""
    kept = Path(__file__).parents[2] / "benchmarks" / "results" / "direction.json"
    options = Options(max_tokens=read(kept).settings["max_tokens"])
    assert any(open_results(kept, "direction", options).has(cell) for cell in cells(options))
