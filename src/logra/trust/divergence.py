"""Distances between token distributions as pure functions of logits.

Legend: n tokens of one chunk, V vocabulary. Every function takes [n, V] logits of any floating dtype, computes in fp32
(fp64 for fp64 input) and returns [n] nats per token. With tau the sampling temperature and p = softmax(z / tau):

    half_variance   1/2 Var_p(d / tau)                      the KL to second order along a logit tangent d
    exact_kl        sum_v p_v (log p_v - log p'_v)          the KL of a finite change of the logits z -> z'
"""

import torch
from torch import Tensor

# Below this |x| the four terms of the series are exact to 2e-8 (relative error x^4 / 360), above it the rounding error
# of exp(x) - 1 - x is below 3e-6 relative.
_SERIES_LIMIT = 0.05


def half_variance(logits: Tensor, tangent: Tensor, temperature: float) -> Tensor:
    """Second-order KL(p || p') per token when the logits move along `tangent`: 1/2 Var_p(tangent / tau).

    The p-mean is subtracted first and the squares are averaged afterwards (two passes): E[d^2] - E[d]^2 would lose
    every digit in fp32 when all logits drift together, which leaves the policy unchanged.

    Args:
        logits: z, [n, V].
        tangent: d, [n, V].
        temperature: tau > 0.

    Returns:
        [n] nats per token.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    probabilities = torch.softmax(logits.to(dtype) / temperature, dim=-1)
    moved = tangent.to(dtype) / temperature
    moved = moved - (probabilities * moved).sum(-1, keepdim=True)
    return 0.5 * (probabilities * moved.square()).sum(-1)


def exact_kl(logits: Tensor, new_logits: Tensor, temperature: float) -> Tensor:
    """KL(p || p') per token for two sets of logits, accurate down to the smallest steps.

    With x = log p' - log p the KL is -sum p x, a sum of large terms of both signs whose first order cancels: in fp32 a
    KL of 1e-9 is all rounding. Because sum p (e^x - 1) = 0, it also equals

        KL = sum_v p_v (e^x_v - 1 - x_v),

    whose terms are >= 0 and of second order: nothing cancels between them, and an error in the normaliser of p' enters
    squared. Inside a term, e^x - 1 - x comes from its series for |x| < 0.05 and otherwise from p' - p - p x, which
    cannot overflow. x itself starts from the difference of the logits, not of two rounded log-softmaxes.

    Args:
        logits: z, [n, V].
        new_logits: z', [n, V].
        temperature: tau > 0.

    Returns:
        [n] nats per token, >= 0.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
    p = log_p.exp()
    x = (new_logits.to(dtype) - logits.to(dtype)) / temperature
    x = x - (p * x).sum(-1, keepdim=True)
    x = x - torch.logsumexp(log_p + x, dim=-1, keepdim=True)
    series = p * x.square() * (0.5 + x * (1 / 6 + x * (1 / 24 + x / 120)))
    closed = (log_p + x).exp() - p - p * x
    return torch.where(x.abs() < _SERIES_LIMIT, series, closed).sum(-1).clamp_min(0.0)
