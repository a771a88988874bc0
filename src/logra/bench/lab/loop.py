"""The loop: roll out, take a step of the arm, measure what the step was worth on samples it has not seen.

Gain of a step, out of sample: with samples y of the *new* policy (the next step's rollout, on other prompts) and
w = p_old(y) / p_new(y), taken by injecting the step backwards into the new model,

    E_new[R] - E_old[R] = E_new[(1 - w) (R - b)],        b: mean reward of the other samples of the group,

unbiased as b does not depend on y. Collateral: exact KL(old || new) on unrelated text, nats per token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra.bench.lab.arms import Arm, DenseArm, SketchedArm
from logra.bench.lab.sampling import Rollout, log_probs
from logra.trust.dense import DenseInjection
from logra.trust.injection import Injection
from logra.trust.measure import kl_since, probe_logits
from logra.trust.probe import Probe


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all arms share.

    Attributes:
        num_steps: updates.
        temperature: of the sampling.
        micro_batch: completions per forward and backward.
        roll_out: from the model and the step number to fresh completions; the same prompts and noise for all arms.
        unrelated: text on which collateral is measured.
        measure_every: steps from one whose gain and collateral are measured to the next.
    """

    num_steps: int
    temperature: float
    micro_batch: int
    roll_out: Callable[[Any, int], Rollout]
    unrelated: Probe
    measure_every: int = 1


def run_arm(model: Any, arm: Arm, setting: Setting, *, trust: Any, seed: int) -> dict[str, list[float | None]]:
    """Train with one arm.

    Returns:
        Curves with one value a step (reward: one more, of the last policy): reward of the samples before the step, gain,
        collateral_kl, and with a trust policy realised_kl and predicted_kl of the step as taken. None: no step was taken,
        or this one was not measured.
    """
    with arm.in_force():
        return _run(model, arm.build(model, trust, seed), setting)


def _run(model: Any, stepper: SketchedArm | DenseArm, setting: Setting) -> dict[str, list[float | None]]:
    names = ("reward", "gain", "collateral_kl", "realised_kl", "predicted_kl")
    curves: dict[str, list[float | None]] = {name: [] for name in names}
    model.eval()
    for step in range(setting.num_steps + 1):
        rollout = setting.roll_out(model, step)
        curves["reward"].append(rollout.rewards.mean().item())
        is_last = step == setting.num_steps
        values = backward(
            model, rollout, temperature=setting.temperature, micro_batch=setting.micro_batch, differentiate=not is_last
        )
        if step > 0:
            is_measured = (step - 1) % setting.measure_every == 0
            curves["gain"].append(_gain(model, stepper, rollout, values, setting) if is_measured else None)
        if is_last:
            break
        if not values:
            for name in names[2:]:
                curves[name].append(None)
            continue
        before = probe_logits(model, setting.unrelated) if step % setting.measure_every == 0 else None
        diagnostics = stepper.step(rollout.probe(setting.temperature))
        curves["collateral_kl"].append(None if before is None else kl_since(model, setting.unrelated, before))
        alpha, predicted = diagnostics.get("alpha"), diagnostics.get("predicted_kl")
        curves["realised_kl"].append(diagnostics.get("realised_kl"))
        curves["predicted_kl"].append(None if alpha is None or predicted is None else alpha**2 * predicted)
    return curves


def backward(
    model: nn.Module, rollout: Rollout, *, temperature: float, micro_batch: int, differentiate: bool = True
) -> dict[int, Tensor]:
    """Policy gradient of the rollout, averaged over its tokens; without `differentiate` the log-probabilities alone.

    Returns:
        First row of every micro-batch that has an advantage -> log-probabilities of its tokens, fp32 [rows, C].
    """
    advantages = rollout.advantages()
    num_tokens = rollout.generated.sum()
    found = {}
    for start in range(0, len(advantages), micro_batch):
        rows = slice(start, start + micro_batch)
        if advantages[rows].any():
            with torch.set_grad_enabled(differentiate):
                values = log_probs(model, rollout, rows, temperature)
            found[start] = values.detach()
            if differentiate:
                (-(advantages[rows, None] * values).sum() / num_tokens).backward()
    return found


@torch.no_grad()
def _gain(
    model: nn.Module,
    stepper: SketchedArm | DenseArm,
    rollout: Rollout,
    values: Mapping[int, Tensor],
    setting: Setting,
) -> float | None:
    """Gain of the last step; rows without an advantage add nothing to it, as their reward is that of their group."""
    deltas, dense = stepper.undo()
    if not deltas and not dense:
        return None
    total = 0.0
    for start, new in values.items():
        rows = slice(start, start + setting.micro_batch)
        with Injection(deltas, "value"), DenseInjection(model, dense, "value"):
            old = log_probs(model, rollout, rows, setting.temperature)
        weight = (old - new).sum(1).exp()
        total += ((1 - weight) * rollout.left_out_rewards()[rows]).sum().item()
    return total / len(rollout.rewards) if math.isfinite(total) else None
