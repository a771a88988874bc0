"""The sketch optimizer in a plain PyTorch loop, for any model of torch.nn.Linear layers: no RL library needed.

    python examples/pytorch_loop.py

A small character model learns by policy gradient to answer with a given letter. Every step is scaled to a budget of KL
before it is taken; the weights never have a dense gradient.
"""

import argparse

import torch
from torch import Tensor, nn

import logra

VOCABULARY = 16
PROMPT, RESPONSE = 4, 8  # tokens
GOOD_TOKEN = 7


class CharacterModel(nn.Module):
    """Token ids [batch, tokens] -> logits [batch, tokens, vocabulary]; position t sees tokens 0..t."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(width, width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        x = x + torch.tanh(self.mix(x.cumsum(dim=1) / counts))
        x = x + self.down_proj(torch.relu(self.up_proj(x)))
        return self.head(x)


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor) -> Tensor:
    """Continue prompts [batch, PROMPT] by RESPONSE tokens drawn at temperature 1."""
    ids = prompts
    for _ in range(RESPONSE):
        probabilities = torch.softmax(model(ids)[:, -1], dim=-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    return ids


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: 30)")
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    model = CharacterModel()
    optimizer = logra.SketchOptimizer(
        model,
        lr=1e-2,
        rank=8,
        target_modules=("mix", "up_proj", "down_proj"),
        trust=logra.TrustRegion(kl_budget=0.02),
    )
    rewards = []
    for step in range(arguments.steps):
        ids = sample(model, torch.randint(VOCABULARY, (64, PROMPT)))
        reward = (ids[:, PROMPT:] == GOOD_TOKEN).float().mean(dim=1)  # [batch]
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)

        generated = torch.zeros_like(ids)
        generated[:, PROMPT:] = 1
        log_probs = torch.log_softmax(model(ids)[:, PROMPT - 1 : -1], dim=-1)
        chosen = log_probs.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)  # [batch, RESPONSE]
        loss = -(advantage[:, None] * chosen).mean()

        loss.backward()
        optimizer.set_probe(input_ids=ids, attention_mask=torch.ones_like(ids), loss_mask=generated)
        optimizer.step()
        optimizer.zero_grad()

        rewards.append(reward.mean().item())
        numbers = optimizer.diagnostics()
        print(
            f"step {step + 1:2d}  reward {rewards[-1]:.3f}  "
            f"predicted KL {numbers['predicted_kl'] * numbers['alpha'] ** 2:.4f}  "
            f"realised KL {numbers['realised_kl']:.4f}  step length x {numbers['alpha']:.3f}"
        )
    return rewards


if __name__ == "__main__":
    main()
