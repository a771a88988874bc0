"""The KL term against exact enumeration of a tiny vocabulary, in float64."""

import pytest
import torch

from logra.rl.guards.kl import mean_kl, token_kl

VOCABULARY = 6


@pytest.fixture
def policy():
    """Logits with gradient, and the log-probabilities of policy and reference over all tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, reference


def expected_term(logits, reference, **options):
    """Expectation of the term over tokens drawn from the (detached) policy, by enumeration."""
    log_p = logits.log_softmax(0)
    old = log_p.detach() if options.pop("importance", False) else None
    term = token_kl(log_p, reference, log_p_old=old, clamp=options.pop("clamp", 50.0), **options)
    return (log_p.detach().exp() * term).sum()


def reverse_kl(logits, reference):
    log_p = logits.log_softmax(0)
    return (log_p.exp() * (log_p - reference)).sum()


def forward_kl(logits, reference):
    return (reference.exp() * (reference - logits.log_softmax(0))).sum()


def gradient(value, logits):
    return torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("importance", [True, False])
def test_k3_has_the_value_of_the_kl(policy, importance):
    logits, reference = policy
    value = expected_term(logits, reference, estimator="k3", importance=importance)
    assert value.item() == pytest.approx(reverse_kl(logits, reference).item(), rel=1e-12)


def test_k2_is_half_the_mean_square_of_the_log_ratio(policy):
    logits, reference = policy
    log_p = logits.detach().log_softmax(0)
    by_hand = sum(log_p[i].exp() * 0.5 * (reference[i] - log_p[i]) ** 2 for i in range(VOCABULARY))
    assert expected_term(logits, reference, estimator="k2").item() == pytest.approx(by_hand.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "divergence"),
    [
        ({"estimator": "k2"}, reverse_kl),
        ({"estimator": "k3", "importance": True}, reverse_kl),
        ({"estimator": "k3"}, forward_kl),
    ],
    ids=["k2", "k3 with importance", "k3"],
)
def test_gradient_is_that_of_the_divergence(policy, options, divergence):
    # Swapping the direction of the KL, or forgetting the ratio's gradient, fails here.
    logits, reference = policy
    found = gradient(expected_term(logits, reference, **options), logits)
    torch.testing.assert_close(found, gradient(divergence(logits, reference), logits), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_far_token_is_bounded_and_still_pulls(estimator):
    log_q = torch.tensor([-1.0, -1.0, -80.0])
    log_p = torch.tensor([-60.0, -4.0, -1.0], requires_grad=True)
    term = token_kl(log_p, log_q, estimator=estimator, clamp=3.0)
    (slope,) = torch.autograd.grad(term.sum(), log_p)
    near = token_kl(log_p.detach()[1:2], log_q[1:2], estimator=estimator, clamp=50.0)
    assert term[0].item() == pytest.approx(near.item())  # a log-ratio of 59 counts as one of 3
    assert slope[0].item() == pytest.approx(slope[1].item())  # and pulls as one of 3, not at all with a plain clamp
    assert slope[0] < 0 < slope[2]  # towards the reference from both sides


def test_equal_policies_have_neither_value_nor_pull():
    log_p = torch.tensor([-1.0, -2.0], requires_grad=True)
    for estimator in ("k2", "k3"):
        term = token_kl(log_p, log_p.detach(), estimator=estimator, clamp=10.0, log_p_old=log_p.detach())
        (slope,) = torch.autograd.grad(term.sum(), log_p)
        assert term.tolist() == [0.0, 0.0] and slope.tolist() == [0.0, 0.0]


def test_the_mean_is_over_the_tokens_of_the_whole_batch():
    term = torch.tensor([[1.0, 2.0], [4.0, float("nan")]])
    mask = torch.tensor([[1, 1], [1, 0]])
    # Two micro-batches, of 3 and of 2 tokens: their parts add up to the mean over 5.
    rest = torch.tensor([[3.0, 5.0]]), torch.ones(1, 2)
    total = mean_kl(term, mask, 5.0) + mean_kl(*rest, 5.0)
    assert total.item() == pytest.approx((1 + 2 + 4 + 3 + 5) / 5)
