"""A two-layer character model, trained from scratch until it knows a little, and its reinforcement-learning task.

Task: `12+34=` -> `46` and an end token, reward 1 for the right sum. Unrelated text: copying five letters, which the
model has learned as well and which no reward mentions.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logra.bench.lab.arms import Arm
from logra.bench.lab.loop import Setting, run_arm
from logra.bench.lab.sampling import Rollout, sample
from logra.contracts import TrustPolicy
from logra.optim.setup import WEIGHT_DTYPES
from logra.trust import TrustRegion
from logra.trust.probe import Probe

ALPHABET = "0123456789+=>abcdefghij"
END = len(ALPHABET)
START_ACCURACY = 0.27
HELDOUT_DIGIT = 8  # sums whose first term ends in it are held out


def encode(text: str) -> list[int]:
    """Ids of the characters."""
    return [ALPHABET.index(character) for character in text]


@lru_cache(maxsize=1)
def pretrained_state(seed: int) -> dict[str, Tensor]:
    """Weights after supervised training to about `START_ACCURACY` sampled accuracy on sums."""
    torch.manual_seed(seed)
    model = new_model()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20_000):
        ids, targets = _supervised_batch(generator, 128)
        loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(),
                               ignore_index=-100)  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and accuracy(model, generator, heldout=False) >= START_ACCURACY:
            return model.state_dict()
    raise AssertionError("the small policy did not learn sums")


def new_model() -> Any:
    """Llama of two layers, hidden size 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=END + 1, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
                         tie_word_embeddings=False, pad_token_id=END, bos_token_id=None, eos_token_id=END)  # fmt: skip
    return LlamaForCausalLM(config)


def build_policy(seed: int) -> Any:
    """A fresh copy of the pretrained policy of this seed."""
    model = new_model()
    model.load_state_dict(pretrained_state(seed))
    return model


def train(arm: Arm, *, seed: int, num_steps: int, trust: TrustPolicy | None, from_bf16: bool = False) -> dict[str, Any]:
    """Train the pretrained policy of a seed with one arm: the same prompts and noise for all arms, 16 x 8 samples a step.

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
    setting = Setting(
        num_steps=num_steps,
        temperature=1.0,
        micro_batch=128,
        roll_out=lambda policy, step: roll_out(
            policy, torch.Generator().manual_seed(100_003 * seed + step), num_prompts=16, num_samples=8
        ),
        unrelated=unrelated_text(),
    )
    curves = run_arm(model, arm, setting, trust=trust, seed=seed)
    return {**curves, "heldout": accuracy(model.eval(), torch.Generator().manual_seed(seed))}


def roll_out(model: nn.Module, generator: torch.Generator, *, num_prompts: int, num_samples: int,
             heldout: bool = False) -> Rollout:  # fmt: skip
    """Fresh sums and sampled answers."""
    terms = _terms(generator, num_prompts, heldout=heldout)
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


def accuracy(model: nn.Module, generator: torch.Generator, *, heldout: bool = True) -> float:
    """Sampled accuracy on 512 sums."""
    return roll_out(model, generator, num_prompts=512, num_samples=1, heldout=heldout).rewards.mean().item()


def unrelated_text() -> Probe:
    """Sixteen lines of copied letters; every token but the first counts."""
    generator = torch.Generator().manual_seed(0)
    ids = _copies(generator, 16)[:, :-1]
    loss_mask = torch.ones_like(ids)
    loss_mask[:, 0] = 0
    return TrustRegion(min_responses=16, min_tokens=1).make_probe(
        input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=loss_mask, temperature=1.0
    )


def _terms(generator: torch.Generator, count: int, *, heldout: bool) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        a, b = torch.randint(0, 100, (2,), generator=generator).tolist()
        if (a % 10 == HELDOUT_DIGIT) == heldout:
            pairs.append((a, b))
    return pairs


def _copies(generator: torch.Generator, count: int) -> Tensor:
    letters = torch.randint(ALPHABET.index("a"), END, (count, 5), generator=generator)
    arrow = torch.full((count, 1), ALPHABET.index(">"))
    return torch.cat([letters, arrow, letters, torch.full((count, 1), END)], dim=1)


def _supervised_batch(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Three quarters sums, one quarter copies; ids [count, 12] and targets, -100 outside the answers."""
    rows, targets = [], []
    for a, b in _terms(generator, 3 * count // 4, heldout=False):
        prompt, answer = encode(f"{a:02d}+{b:02d}="), [*encode(str(a + b)), END]
        fill = 12 - len(prompt) - len(answer)
        rows.append(prompt + answer + [END] * fill)
        targets.append([-100] * len(prompt) + answer + [-100] * fill)
    for row in _copies(generator, count // 4).tolist():
        rows.append(row)
        targets.append([-100] * 6 + row[6:])
    return torch.tensor(rows), torch.tensor(targets)
