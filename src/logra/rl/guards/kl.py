"""KL to a reference policy as a term of the loss: estimators on sampled tokens, with a clamped log-ratio.

With the sampled token's log-probability log p under the policy and log q under the reference, and
d = clamp(log q - log p, -c, c):

    k2 = d² / 2                 biased value (small where the policies are close)
    k3 = exp(d) - 1 - d         never negative, expectation KL(p || q)

What the optimizer follows is the expected *gradient* over tokens drawn from p:

    k2                          ∇ KL(p || q)
    k3 with importance          ∇ KL(p || q)     the ratio p / p_old = 1 has the gradient ∇ log p
    k3 without                  ∇ KL(q || p)

The clamp bounds the term and its gradient: exp(log q - log p) has no bound, and one token that the policy has all but
forgotten would outweigh the batch. A clamped token keeps the gradient that it has at the clamp (a plain `clamp` would have
none there, and would let go of the policy just where it is furthest away).
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k2", "k3"]


def token_kl(
    log_p: Tensor, log_q: Tensor, *, estimator: Estimator, clamp: float, log_p_old: Tensor | None = None
) -> Tensor:
    """The KL term of every sampled token.

    Args:
        log_p: log-probabilities under the policy, with gradient, fp32 of any shape, nats.
        log_q: under the reference, same shape.
        estimator: "k2" or "k3".
        clamp: c, largest |log q - log p|, nats, > 0.
        log_p_old: under the policy that sampled: the term is multiplied by p / p_old. None does not.

    Returns:
        fp32 of the same shape, nats, at least 0.
    """
    held = log_p.detach()
    # The value of the clamped log-ratio, with the gradient of the plain one.
    d = (log_q - held).clamp(-clamp, clamp) + (held - log_p)
    term = 0.5 * d.square() if estimator == "k2" else torch.expm1(d) - d
    return term if log_p_old is None else term * torch.exp(log_p - log_p_old)


def mean_kl(term: Tensor, mask: Tensor, num_tokens: Tensor | float) -> Tensor:
    """Mean over the generated tokens of a batch, of which these are a part: the same meaning with every loss type.

    Args:
        term: fp32 [B, C], from `token_kl`.
        mask: [B, C], 1 at generated tokens.
        num_tokens: generated tokens of the whole batch (all micro-batches of a step).
    """
    # A padded position may hold anything, NaN too.
    return term.masked_fill(mask == 0, 0.0).sum() / num_tokens
