"""Rewards, GAE, whitening and the KL controller against loops by hand in float64."""

import math
from functools import partial

import pytest
import torch

from step3_ppo.advantages import (
    KlController,
    RewardShaping,
    ScoredRollout,
    answer_scores,
    estimate_distill,
    gae,
    grpo,
    is_uniform,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_weighted,
    masked_mean,
    masked_variance,
    online_dpo,
    rloo,
    shaped_rewards,
    whiten,
)
from tests.step3_ppo.example_rollouts import Table, close, lengths_of, mask_of, table, tensor

LENGTHS = lengths_of(6, 9, seed=1)


def rewards_by_hand(scores: list[float], kl: Table, kl_coef: float) -> Table:
    """Add the score at the last token and the penalty at every token."""
    made = [[-kl_coef * k for k in row] for row in kl]
    for row, score in zip(made, scores, strict=True):
        row[-1] += score
    return made


def gae_by_hand(rewards: Table, values: Table, gamma: float, lam: float) -> tuple[Table, Table]:
    """Sum the discounted deltas explicitly (equation 16), without the recursion."""
    advantages, returns = [], []
    for reward, value in zip(rewards, values, strict=True):
        following = [*value[1:], 0.0]
        deltas = [r + gamma * after - v for r, after, v in zip(reward, following, value, strict=True)]
        row = [
            math.fsum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
            for t in range(len(deltas))
        ]
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, value, strict=True)])
    return advantages, returns


def test_weighted_k3_is_unbiased_away_from_the_old_policy() -> None:
    """The expectation over three tokens under the old policy is the exact KL(p, q) with the exact gradient."""
    logits = torch.tensor([0.3, -0.4, 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.2, 0.5, 0.1], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([1.0, 0.0, 0.2], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    mean = (old.exp() * kl_k3_weighted(logprobs, reference, old)).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=1e-9)
    gradients = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (exact, mean)]
    assert gradients[1].tolist() == pytest.approx(gradients[0].tolist(), rel=1e-9)
    assert kl_k3_weighted(torch.tensor(-1.0), torch.tensor(-2.0), torch.tensor(-1.5)).item() == pytest.approx(
        math.exp(0.5) * (math.exp(-1.0) - 1 + 1)
    )


def test_kl_estimators() -> None:
    ours, theirs = table(LENGTHS, 2, scale=0.7, shift=-2), table(LENGTHS, 3, scale=0.7, shift=-2)
    k1 = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, theirs, strict=True)]
    k3 = [[math.exp(b - a) - 1 - (b - a) for a, b in zip(x, y, strict=True)] for x, y in zip(ours, theirs, strict=True)]
    close(kl_k1(tensor(ours), tensor(theirs)), k1)
    close(kl_k2(tensor(ours), tensor(theirs)), [[0.5 * k * k for k in row] for row in k1])
    close(kl_k3(tensor(ours), tensor(theirs)), k3)
    assert min(v for row in k1 for v in row) < 0 <= min(v for row in k3 for v in row)
    assert torch.isfinite(kl_k3(torch.tensor([-200.0, 0.0]), torch.tensor([0.0, -200.0]))).all()


def test_the_score_is_at_the_last_response_token_and_the_penalty_at_each() -> None:
    kl = table(LENGTHS, 4)
    scores = [row[0] for row in table([1] * len(LENGTHS), 5, scale=3)]
    actual = shaped_rewards(torch.tensor(scores), tensor(kl), mask_of(LENGTHS), kl_coef=0.13)
    close(actual, rewards_by_hand(scores, kl, 0.13))
    last = shaped_rewards(torch.ones(2), torch.zeros(2, 4), mask_of([3, 4]), kl_coef=1.0)
    assert last.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    rewards, values = table(LENGTHS, 6), table(LENGTHS, 7, scale=2)
    advantages, returns = gae(tensor(rewards), tensor(values), mask_of(LENGTHS), gamma=gamma, lam=lam)
    expected = gae_by_hand(rewards, values, gamma, lam)
    close(advantages, expected[0])
    close(returns, expected[1])


def test_mean_variance_and_whitening_over_the_mask_of_the_whole_batch() -> None:
    rows = table(LENGTHS, 10, scale=3, shift=5)
    flat = [v for row in rows for v in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((v - mean) ** 2 for v in flat) / len(flat)
    x, mask = tensor(rows, junk=1e6), mask_of(LENGTHS)
    assert masked_mean(x, mask).item() == pytest.approx(mean, rel=1e-6)
    assert masked_variance(x, mask).item() == pytest.approx(variance, rel=1e-5)
    white = whiten(x, mask)
    close(white, [[(v - mean) / math.sqrt(variance + 1e-8) for v in row] for row in rows])
    assert abs(white[mask].mean().item()) < 1e-6
    assert white[mask].std(unbiased=False).item() == pytest.approx(1, abs=1e-5)


def test_online_dpo_by_hand() -> None:
    """Prompt 1: the second answer is best, the third worst, r = -0.5 and 1. Prompt 2: all scores are equal."""
    scores = torch.tensor([1.0, 4.0, -2.5, 2.0, 2.0, 2.0])
    ratios = torch.tensor([9.0, -0.5, 1.0, 3.0, 1.0, 2.0])
    weight = 0.4 / (1 + math.exp(0.4 * (-0.5 - 1.0)))
    actual = online_dpo(scores, ratios, 3, beta=0.4)
    assert actual.tolist() == pytest.approx([0.0, weight, -weight, 0.0, 0.0, 0.0])


def test_scores_that_differ_by_rounding_are_equal() -> None:
    """Answers score 0.1, or 0.4 less 0.01 for each of 30 tokens. A difference of 0.0001 is no rounding."""
    lengths, shaping = torch.tensor([5, 35, 5, 5]), RewardShaping(length_penalty=0.01, length_free=5)
    scores = answer_scores(torch.tensor([0.1, 0.4, 0.1, 0.1001]), torch.ones(4, dtype=torch.bool), lengths, shaping)
    assert scores[0] != scores[1]
    assert is_uniform(scores, 2).tolist() == [True, False]
    assert online_dpo(scores, torch.zeros(4), 2, beta=0.4).tolist() == pytest.approx([0.0, 0.0, -0.2, 0.2])


def test_a_policy_gradient_step_towards_the_teacher_lowers_the_reverse_kl() -> None:
    """The expected gradient over all tokens of a position is that of sum p log(p / q)."""
    noise = torch.Generator().manual_seed(4)
    logits = torch.randn(5, dtype=torch.float64, generator=noise).requires_grad_()
    teacher = torch.randn(5, dtype=torch.float64, generator=noise).log_softmax(0)
    student = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    mask, none = torch.ones(1, 5, dtype=torch.bool), torch.empty(0)
    rollout = ScoredRollout(none, mask, none, student.detach()[None], teacher[None], None)
    advantages = estimate_distill(rollout, none, none).advantages[0]
    (actual,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), logits)
    torch.testing.assert_close(actual, expected)


def test_a_policy_gradient_step_with_these_advantages_is_a_step_of_dpo() -> None:
    noise = torch.Generator().manual_seed(3)
    logprobs = torch.randn(4, dtype=torch.float64, generator=noise).requires_grad_()
    reference = torch.randn(4, dtype=torch.float64, generator=noise)
    scores = torch.tensor([0.3, -1.0, 2.0, 5.0], dtype=torch.float64)
    ratios = logprobs - reference
    margins = torch.stack([ratios[0] - ratios[1], ratios[3] - ratios[2]])
    (expected,) = torch.autograd.grad(-torch.nn.functional.logsigmoid(0.7 * margins).sum(), logprobs, retain_graph=True)
    advantages = online_dpo(scores, ratios.detach(), 2, beta=0.7)
    (actual,) = torch.autograd.grad(-(advantages * logprobs).sum(), logprobs)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("samples", [3, 6, 7])
def test_equal_scores_give_zero_advantages_despite_rounding(samples: int) -> None:
    flat = torch.tensor([100.1, -3.3333, 1.3, 0.7]).repeat_interleave(samples)
    for estimate in (partial(grpo, divide_by_std=True), partial(grpo, divide_by_std=False), rloo):
        assert estimate(flat, samples).tolist() == [0.0] * (4 * samples)


def test_empty_means_are_zero_and_equal_values_whiten_to_zero() -> None:
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(torch.ones(2, 3), empty).item() == 0
    assert masked_variance(torch.ones(2, 3), empty).item() == 0
    assert whiten(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool)).abs().max().item() == 0


@pytest.mark.parametrize(("kl", "error"), [(9.0, 0.2), (6.3, 0.05), (5.7, -0.05), (1.0, -0.2), (6.0, 0.0)], ids=str)
def test_kl_controller_uses_the_clipped_error(kl: float, error: float) -> None:
    """Ziegler et al.: e = clip(KL / target - 1, -0.2, 0.2), coefficient *= 1 + e * n / horizon."""
    before = KlController(0.15, 6.0, 10000)
    after = before.after(kl, 512)
    assert after.coef == pytest.approx(0.15 * (1 + error * 512 / 10000), rel=1e-12)
    assert (after.target, after.horizon) == (6.0, 10000)


def test_kl_controller_is_constant_without_a_target() -> None:
    assert KlController(0.05, None, 10000).after(100.0, 512).coef == 0.05
