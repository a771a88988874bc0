"""A two-layer character model, trained from scratch until it knows a little, and its reinforcement-learning task.

Task: `12+34=` -> `46` and an end token, reward 1 for the right sum. Unrelated text: copying five letters, which the
model has learned as well and which no reward mentions.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logra.bench.lab.arms import Arm
from logra.bench.lab.loop import Setting, run_arm
from logra.bench.lab.sampling import Rollout, sample
from logra.contracts import TrustPolicy
from logra.optim.setup import WEIGHT_DTYPES
from logra.rl.default_model import cache_folder
from logra.sync.durable import locked, write_bytes
from logra.trust import TrustRegion
from logra.trust.probe import Probe

ALPHABET = "0123456789+=>abcdefghij"
END = len(ALPHABET)
START_ACCURACY = 0.27


@dataclass(frozen=True)
class Sums:
    """Which sums there are.

    Attributes:
        num_terms: both terms are below it.
        is_heldout: whether a sum, given its terms, is kept from all training.
    """

    num_terms: int
    is_heldout: Callable[[int, int], bool]


TWO_DIGITS = Sums(100, lambda a, b: a % 10 == 8)
"""Ten thousand sums, of which RL learns slowly, at this size and in a minute."""
_FIFTY = frozenset(random.Random(0).sample([(a, b) for a in range(20) for b in range(20)], 50))
TWENTY = Sums(20, lambda a, b: (a, b) in _FIFTY)
"""Four hundred sums, fifty of them held out at random: RL learns them in tens of steps."""


def encode(text: str) -> list[int]:
    """Ids of the characters."""
    return [ALPHABET.index(character) for character in text]


def pretrained_state(seed: int, sums: Sums) -> dict[str, Tensor]:
    """The pretrained weights of a seed, from the cache folder if this code has made them before."""
    key = f"{Path(__file__).read_text()} {torch.__version__} {sums.num_terms} {seed}"
    file = cache_folder() / f"small-policy-{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.parent) as directory:
        if not file.exists():
            write_bytes(file, safetensors.torch.save(_pretrain(seed, sums)), directory)
        return safetensors.torch.load_file(file)


def _pretrain(seed: int, sums: Sums) -> dict[str, Tensor]:
    """Supervised training to about `START_ACCURACY` sampled accuracy on sums that are not held out."""
    torch.manual_seed(seed)
    model = new_model()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20_000):
        ids, targets = _supervised_batch(generator, 128, sums)
        loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(),
                               ignore_index=-100)  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and accuracy(model, generator, sums, heldout=False) >= START_ACCURACY:
            return model.state_dict()
    raise AssertionError("the small policy did not learn sums")


def new_model() -> Any:
    """Llama of two layers, hidden size 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=END + 1, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
                         tie_word_embeddings=False, pad_token_id=END, bos_token_id=None, eos_token_id=END)  # fmt: skip
    return LlamaForCausalLM(config)


def build_policy(seed: int, sums: Sums = TWO_DIGITS) -> Any:
    """A fresh copy of the pretrained policy of this seed."""
    model = new_model()
    model.load_state_dict(pretrained_state(seed, sums))
    return model


def train(arm: Arm, *, seed: int, num_steps: int, trust: TrustPolicy | None, from_bf16: bool = False) -> dict[str, Any]:
    """Train the pretrained policy of a seed with one arm on sums of two digits, 16 prompts a step.

    Args:
        arm: whose `weight_storage`, if it is not fp32, decides that the model is in bf16.
        seed: of the policy, the prompts and the noise.
        num_steps: updates.
        trust: scales the steps; None takes them in full.
        from_bf16: round the pretrained weights to bf16 first, so that all weight storages begin with the same.

    Returns:
        The curves of `run_arm`, and `heldout`, the sampled accuracy at the end.
    """
    model = build_policy(seed)
    if from_bf16:
        model.bfloat16()
    model.to(WEIGHT_DTYPES[arm.settings.get("weight_storage", "fp32")])
    curves = train_policy(
        model, arm, TWO_DIGITS, seed=seed, num_steps=num_steps, num_prompts=16, trust=trust, measure_every=1
    )
    return {**curves, "heldout": accuracy(model.eval(), torch.Generator().manual_seed(seed), TWO_DIGITS)}


def train_policy(
    model: nn.Module, arm: Arm, sums: Sums, *, seed: int, num_steps: int, num_prompts: int, trust: TrustPolicy | None,
    measure_every: int,
) -> dict[str, list[float | None]]:  # fmt: skip
    """The curves of `run_arm` on sums: the same prompts and noise for all arms of a seed, 8 samples a prompt."""
    setting = Setting(
        num_steps=num_steps,
        temperature=1.0,
        micro_batch=8 * num_prompts,
        roll_out=lambda policy, step: roll_out(
            policy, torch.Generator().manual_seed(100_003 * seed + step), sums, num_prompts=num_prompts, num_samples=8
        ),
        unrelated=unrelated_text(),
        measure_every=measure_every,
    )
    return run_arm(model, arm, setting, trust=trust, seed=seed)


def roll_out(model: nn.Module, generator: torch.Generator, sums: Sums = TWO_DIGITS, *, num_prompts: int, num_samples: int,
             heldout: bool = False) -> Rollout:  # fmt: skip
    """Fresh sums and sampled answers."""
    terms = _terms(generator, num_prompts, sums, heldout=heldout)
    prompts = [encode(f"{a:02d}+{b:02d}=") for a, b in terms]
    ids, mask, generated = sample(model, prompts, num_samples=num_samples, max_new_tokens=4, end_id=END,
                                  temperature=1.0, generator=generator)  # fmt: skip
    answers = [[*encode(str(a + b)), END] for a, b in terms for _ in range(num_samples)]
    width = len(prompts[0])
    rewards = [
        float(row[width : width + len(answer)] == answer and sum(flags) == len(answer))
        for row, flags, answer in zip(ids.tolist(), generated.tolist(), answers, strict=True)
    ]
    return Rollout(ids, mask, generated, torch.tensor(rewards), num_samples)


def accuracy(model: nn.Module, generator: torch.Generator, sums: Sums, *, heldout: bool = True) -> float:
    """Sampled accuracy on 512 sums."""
    return roll_out(model, generator, sums, num_prompts=512, num_samples=1, heldout=heldout).rewards.mean().item()


@torch.no_grad()
def expected_accuracy(model: nn.Module, sums: Sums, *, heldout: bool) -> float:
    """Mean probability of the right answer over all sums that are held out, or over all others: accuracy without noise."""
    terms = range(sums.num_terms)
    pairs = [(a, b) for a in terms for b in terms if sums.is_heldout(a, b) == heldout]
    ids, targets = _examples(pairs)
    log_probs = -F.cross_entropy(
        model(input_ids=ids).logits[:, :-1].transpose(1, 2), targets[:, 1:], ignore_index=-100, reduction="none"
    )
    return log_probs.sum(1).exp().mean().item()


def unrelated_text() -> Probe:
    """Sixteen lines of copied letters; every token but the first counts."""
    generator = torch.Generator().manual_seed(0)
    ids = _copies(generator, 16)[:, :-1]
    loss_mask = torch.ones_like(ids)
    loss_mask[:, 0] = 0
    return TrustRegion(min_responses=16, min_tokens=1).make_probe(
        input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=loss_mask, temperature=1.0
    )


def _terms(generator: torch.Generator, count: int, sums: Sums, *, heldout: bool) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        a, b = torch.randint(0, sums.num_terms, (2,), generator=generator).tolist()
        if sums.is_heldout(a, b) == heldout:
            pairs.append((a, b))
    return pairs


def _copies(generator: torch.Generator, count: int) -> Tensor:
    letters = torch.randint(ALPHABET.index("a"), END, (count, 5), generator=generator)
    arrow = torch.full((count, 1), ALPHABET.index(">"))
    return torch.cat([letters, arrow, letters, torch.full((count, 1), END)], dim=1)


def _examples(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Sums with their answers: ids [len(pairs), 12], and targets, -100 outside the answers."""
    rows, targets = [], []
    for a, b in pairs:
        prompt, answer = encode(f"{a:02d}+{b:02d}="), [*encode(str(a + b)), END]
        fill = 12 - len(prompt) - len(answer)
        rows.append(prompt + answer + [END] * fill)
        targets.append([-100] * len(prompt) + answer + [-100] * fill)
    return torch.tensor(rows), torch.tensor(targets)


def _supervised_batch(generator: torch.Generator, count: int, sums: Sums) -> tuple[Tensor, Tensor]:
    """Three quarters sums, one quarter copies; ids [count, 12] and targets, -100 outside the answers."""
    ids, targets = _examples(_terms(generator, 3 * count // 4, sums, heldout=False))
    copies = _copies(generator, count // 4)
    copied = copies.clone()
    copied[:, :6] = -100
    return torch.cat([ids, copies]), torch.cat([targets, copied])
