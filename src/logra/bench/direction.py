"""How close sketches come to the true gradient: by rank, kind of layer, tokens and training progress, SmolLM2.

A cell is the default model after some updates, with one seed. Rollouts of the default task follow until enough tokens have
passed through the model; their policy gradient is formed densely in a few layers of every kind, and at 512, 2048, 8192, ...
tokens it is compared with what sketches of it would recover:

    one_sided    cosine of G with S A, S = G Aᵀ
    two_sided    cosine of G with Q R recovered from S and T = B G, l = 2 r
    best         cosine of G with its best approximation of rank r

In weight space: what the directions are worth per unit of KL is the business of `logra bench settings`.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra.bench.harness import Cell, Results, markdown_table, require_positive, spread
from logra.errors import ConfigError
from logra.sign_factor import SignFactor
from logra.sketch.recovery import recover

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = (8, 16, 32, 64, 128, 256)
FIRST_TOKENS = 512
ESTIMATES = ("one_sided", "two_sided", "best")
MICRO_BATCH = 16
Rows = list[dict[str, Any]]
NO_VALUE = "-"
"""In a table: the rank is above the size of the weights."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    updates: tuple[int, ...] = (0, 8)
    """Updates of the policy (two-sided spectral, momentum 0.9) before its gradient is taken."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the problems, samples and projections."""
    max_tokens: int = 65536
    """Tokens of the largest batch, prompts included; compared at 512, every four times as many, and there."""
    layers_per_kind: int = 2
    """Layers of every kind, spread evenly over depth."""
    kl_budget: float = 0.02
    """KL that every update realises, nats per generated token."""

    def __post_init__(self) -> None:
        require_positive(self, "layers_per_kind", "kl_budget")
        if self.max_tokens < FIRST_TOKENS:
            raise ConfigError(f"max_tokens={self.max_tokens!r}: at least {FIRST_TOKENS}")
        if any(count < 0 for count in self.updates):
            raise ConfigError(f"updates={self.updates!r}: numbers of at least 0")


def cells(options: Options) -> list[Cell]:
    """Every policy with every seed."""
    return [{"updates": updates, "seed": seed} for updates in options.updates for seed in options.seeds]


def run_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Train the policy, and compare its gradients."""
    from logra.bench.lab.axes import ARMS
    from logra.bench.lab.equal_kl import equal_kl
    from logra.bench.lab.loop import Setting, run_arm
    from logra.bench.lab.smollm2 import DefaultTask
    from logra.sketch.capture import detach

    updates, seed = cell["updates"], cell["seed"]
    default = DefaultTask(seed, updates)
    if updates:
        setting = Setting(num_steps=updates, temperature=1.0, micro_batch=MICRO_BATCH, roll_out=default.roll_out,
                          unrelated=default.unrelated_text())  # fmt: skip
        run_arm(default.model, ARMS["spectral-32-m"], setting, trust=equal_kl(options.kl_budget), seed=seed)
        detach(default.model)
    layers = spread_layers(default.model, options.layers_per_kind)
    # Steps that training has not reached: other problems, other noise.
    rollouts = (default.roll_out(default.model, 1000 + index) for index in range(10**6))
    rows = []
    for num_tokens, reward in accumulate(default.model, layers, rollouts, token_counts(options.max_tokens)):
        for name, module in layers.items():
            gradient: Any = module.weight.grad
            rows.append(
                {"num_tokens": num_tokens, "reward": reward, "layer": name, "kind": name.rpartition(".")[2]}
                | compare(gradient, RANKS, seed, name)
            )
    return {"rows": rows}


def token_counts(max_tokens: int) -> list[int]:
    """512, 2048, 8192, ... below `max_tokens`, and `max_tokens` itself."""
    return [count for k in range(32) if (count := FIRST_TOKENS * 4**k) < max_tokens] + [max_tokens]


def spread_layers(model: nn.Module, per_kind: int) -> dict[str, nn.Module]:
    """Modules of every kind, evenly over depth, by name."""
    chosen = {}
    for kind in KINDS:
        members = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] == kind]
        count = min(per_kind, len(members))
        for index in range(count):
            name, module = members[int((index + 0.5) / count * len(members))]
            chosen[name] = module
    return chosen


def accumulate(model: Any, layers: dict[str, nn.Module], rollouts: Iterable[Any], counts: Sequence[int]) -> Any:
    """Policy gradients of growing batches, dense, in `weight.grad` of the layers.

    Args:
        model: the policy; only the layers get gradients.
        layers: by name.
        rollouts: fresh completions of the policy, as many as are needed.
        counts: tokens (prompts included) after which to stop and look, ascending.

    Yields:
        Tokens so far, at least the next of `counts`, and the mean reward so far.
    """
    from logra.bench.lab.sampling import log_probs

    model.eval()
    model.requires_grad_(False)
    for module in layers.values():
        parameter: Any = module.weight
        parameter.requires_grad_(True)
        parameter.grad = torch.zeros_like(parameter)
    waiting = list(counts)
    num_tokens, rewards = 0, []
    for rollout in rollouts:
        advantages = rollout.advantages()
        for start in range(0, len(advantages), MICRO_BATCH):
            rows = slice(start, start + MICRO_BATCH)
            if advantages[rows].any():
                (-(advantages[rows, None] * log_probs(model, rollout, rows, 1.0)).sum()).backward()
            num_tokens += int(rollout.attention_mask[rows].sum())
            rewards += rollout.rewards[rows].tolist()
            if num_tokens >= waiting[0]:
                yield num_tokens, statistics.fmean(rewards)
                while waiting and waiting[0] <= num_tokens:
                    waiting.pop(0)
                if not waiting:
                    return


@torch.no_grad()
def compare(gradient: Tensor, ranks: Sequence[int], seed: int, name: str) -> dict[str, Any]:
    """Cosines of G [out, in] with its estimates of every rank (None: a rank above its size), and its numerical ranks.

    Returns:
        {"one_sided": [...], "two_sided": [...], "best": [...], "rank_99": k}; rank_99 is the rank that holds 99 % of ‖G‖².
    """
    found: dict[str, Any] = {estimate: [] for estimate in ESTIMATES}
    if not gradient.any():
        return found | {"rank_99": None}
    energy = torch.linalg.svdvals(gradient).double().square().cumsum(0)
    in_signs, out_signs = SignFactor(seed, 0, name, "in"), SignFactor(seed, 0, name, "out")
    for rank in ranks:
        if rank > min(gradient.shape):
            for estimate in ESTIMATES:
                found[estimate].append(None)
            continue
        a = in_signs.matrix(rank, gradient.shape[1])
        b = out_signs.matrix(2 * rank, gradient.shape[0])
        q, r = recover(gradient @ a.T, b.T @ gradient, b)
        found["one_sided"].append(_cosine(gradient, gradient @ a.T @ a))
        found["two_sided"].append(_cosine(gradient, q @ r))
        found["best"].append(math.sqrt(energy[rank - 1].item() / energy[-1].item()))
    return found | {"rank_99": int((energy < 0.99 * energy[-1]).sum()) + 1}


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def table(results: Results) -> str:
    """By kind of layer at the largest batch of the released weights; by tokens and progress, over all kinds."""
    return "\n\n".join((_by_kind(results), _by_progress(results)))


def _by_kind(results: Results) -> str:
    first = min(results.values("updates"))
    batches = _batches(results, first)
    seeds = batches[max(batches)]
    lines = []
    for kind in KINDS:
        own = [[row for row in rows if row["kind"] == kind] for rows in seeds]
        if ranks := _over_layers(own, lambda row: row["rank_99"]):
            cosines = [
                " / ".join(_mean(_cosines(own, estimate, index)) for estimate in ESTIMATES)
                for index in range(len(RANKS))
            ]
            lines.append([kind, *cosines, spread(ranks, 0)])
    title = (
        f"{_num_tokens(seeds)} tokens, after {first} updates, {_num_seeds(seeds)}: one-sided / two-sided / best rank r"
    )
    return f"{title}\n\n" + markdown_table(["layer", *(f"r = {rank}" for rank in RANKS), "rank of 99 % energy"], lines)


def _by_progress(results: Results) -> str:
    lines = []
    for updates in sorted(results.values("updates")):
        for seeds in _batches(results, updates).values():
            # A batch whose rewards are all the same has no gradient, and says nothing.
            if ranks := _over_layers(seeds, lambda row: row["rank_99"]):
                values = [_cosines(seeds, "two_sided", index) for index in range(len(RANKS))]
                cosines = [spread(found) if found else NO_VALUE for found in values]
                reward = spread(_over_layers(seeds, lambda row: row["reward"]))
                lines.append([str(updates), str(len(ranks)), reward, _num_tokens(seeds), *cosines, spread(ranks, 0)])
    title = "two-sided, mean over the layers of all kinds, and over seeds (range)"
    header = ["updates", "seeds", "reward", "tokens", *(f"r = {rank}" for rank in RANKS), "rank of 99 % energy"]
    return f"{title}\n\n" + markdown_table(header, lines)


def _batches(results: Results, updates: int) -> dict[int, list[Rows]]:
    """By the tokens that were asked for, ascending: the rows of every seed. A batch is the first of at least so many."""
    counts = token_counts(results.settings["max_tokens"])
    batches: dict[int, list[Rows]] = defaultdict(list)
    for result in results.select(updates=updates):
        rows_of: dict[int, Rows] = defaultdict(list)
        for row in result["rows"]:
            rows_of[max(count for count in counts if count <= row["num_tokens"])].append(row)
        for count, rows in rows_of.items():
            batches[count].append(rows)
    return dict(sorted(batches.items()))


def _over_layers(seeds: Sequence[Rows], value: Callable[[dict[str, Any]], float | None]) -> list[float]:
    """Mean over the layers that have a gradient and a value, of every seed that has such layers."""
    values = [[value(row) for row in rows if row["rank_99"] is not None] for rows in seeds]
    known = [[number for number in numbers if number is not None] for numbers in values]
    return [statistics.fmean(numbers) for numbers in known if numbers]


def _cosines(seeds: Sequence[Rows], estimate: str, index: int) -> list[float]:
    return _over_layers(seeds, lambda row: row[estimate][index])


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f}" if values else NO_VALUE


def _num_tokens(seeds: Sequence[Rows]) -> str:
    return f"{statistics.fmean(rows[0]['num_tokens'] for rows in seeds):,.0f}"


def _num_seeds(seeds: Sequence[Rows]) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
