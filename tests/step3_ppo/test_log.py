"""The metrics of a rollout by hand. Padding does not count."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from engine import Update
from engine.parallel.collectives import SentBytes
from pipeline.config.stage_sections import PpoSection
from step3_ppo.advantages import gae
from step3_ppo.log import UpdateMetrics, explained_variance, log_generator_gap, rollout_metrics
from step3_ppo.rollout import Rollout
from tests.step3_ppo.example_rollouts import advantages_of, rollout_of

PROMPTS, RESPONSES = [3, 6, 2, 5, 4], [4, 1, 6, 2, 5]


def dirty(rollout: Rollout) -> Rollout:
    """Return the rollout with junk after the ends of the answers."""
    tables = {
        name: torch.where(rollout.response_mask, getattr(rollout, name), torch.tensor(junk))
        for name, junk in (("logprobs", 3.3), ("reference", -1.1), ("values", 8.0))
    }
    return replace(rollout, **tables)


def flat(values: torch.Tensor) -> list[float]:
    return [value for row, n in zip(values.tolist(), RESPONSES, strict=True) for value in row[:n]]


def kl(rollout: Rollout) -> float:
    targets = advantages_of(rollout_of(PROMPTS, RESPONSES), PpoSection(), kl_coef=0.1)
    return rollout_metrics(replace(rollout, values=None), targets)["kl"]


def test_rollout_metrics() -> None:
    rollout = rollout_of(PROMPTS, RESPONSES)
    targets = advantages_of(rollout, PpoSection(), kl_coef=0.1)
    rows = list(zip(rollout.logprobs.tolist(), rollout.reference.tolist(), RESPONSES, strict=True))
    k1 = [math.fsum(a - b for a, b in zip(x[:n], y[:n], strict=True)) for x, y, n in rows]
    k3 = [math.fsum(math.exp(b - a) - 1 + a - b for a, b in zip(x[:n], y[:n], strict=True)) for x, y, n in rows]
    both = list(zip(flat(rollout.generator), flat(rollout.logprobs), strict=True))
    gaps = [abs(math.exp(g) - math.exp(t)) for g, t in both]
    separate = [math.exp(t - g) - 1 + g - t for g, t in both]
    scores = rollout.scores.tolist()
    expected = {
        "score": statistics.fmean(scores),
        "score_std": statistics.pstdev(scores),
        "score_min": min(scores),
        "score_max": max(scores),
        "reward": statistics.fmean(
            s - (not done) - 0.1 * k for s, done, k in zip(scores, rollout.finished.tolist(), k1, strict=True)
        ),
        "value": statistics.fmean(flat(rollout.values)),
        "return": statistics.fmean(flat(targets.returns)),
        "kl": statistics.fmean(k1),
        "kl_k3": statistics.fmean(k3),
        "response_length": statistics.fmean(RESPONSES),
        "response_length_max": 6,
        "eos_rate": 3 / 5,
        "generator_gap": statistics.fmean(gaps),
        "generator_kl": statistics.fmean(separate),
        "length_correlation": 0.1,  # ranks 3 1 5 2 4 and 1 4 5 3 2: 1 - 6 * 18 / (5 * 24)
    }
    variance = explained_variance(rollout.values, targets.returns, targets.rewards, rollout.response_mask)
    actual = rollout_metrics(rollout, targets)
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert actual["explained_variance"] == variance.item()


def test_a_generator_that_differs_from_the_model_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    log_generator_gap(0.0099)
    assert not caplog.records
    log_generator_gap(0.0123)
    assert "differ by 0.012" in caplog.text and "off-policy" in caplog.text


def test_a_sequences_kl_is_a_sum_over_its_tokens_only() -> None:
    rollout = rollout_of(PROMPTS, RESPONSES)
    assert kl(dirty(rollout)) == pytest.approx(kl(rollout), rel=1e-6)
    logprobs, reference = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), torch.tensor([[-1.5, -2.5], [-1.0, 0.0]])
    two = replace(rollout_of([1, 1], [2, 1]), logprobs=logprobs, reference=reference)
    assert kl(two) == pytest.approx((1.0 - 2.0) / 2)  # the estimate can be negative


def test_explained_variance() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]])
    values = torch.tensor([[1.5, 2.0, 2.0], [4.0, 6.0, -50.0]])
    kept = [(r, v) for r, v, m in zip(returns.flatten(), values.flatten(), mask.flatten(), strict=True) if m]
    errors = [(r - v).item() for r, v in kept]
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance([r.item() for r, _ in kept])
    rewards = torch.tensor([[0.0, 0.0, 3.0], [0.0, 5.0, 0.0]])

    def explained(values: torch.Tensor, returns: torch.Tensor) -> float:
        return explained_variance(values, returns, rewards, mask).item()

    assert explained(values, returns) == pytest.approx(expected, rel=1e-5)
    assert explained(returns + 7, returns) == pytest.approx(1.0)  # a constant error explains all
    assert explained(torch.zeros(2, 3), returns) == pytest.approx(0.0, abs=1e-6)
    assert explained(-returns, returns) == pytest.approx(-3.0)
    assert explained(values, torch.ones(2, 3) + 0.01 * returns) < -100
    assert -math.inf < explained(1e9 * values, torch.ones(2, 3)) < -100  # the rewards are below the rounding error


@pytest.mark.parametrize("score", [0.0, 0.7])
def test_explained_variance_of_equal_rewards_is_zero(score: float) -> None:
    """Their returns differ by rounding only, and the values are not to blame."""
    mask, values = torch.ones(4, 500, dtype=torch.bool), torch.randn(4, 500, generator=torch.manual_seed(0))
    rewards = torch.zeros(4, 500)
    rewards[:, -1] = score
    _, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert returns.std() > 0 and explained_variance(values, returns, rewards, mask) == 0


@pytest.mark.parametrize("size", [1e3, 1e5, 1e6, 1e8])
def test_explained_variance_shows_a_critic_that_diverges(size: float) -> None:
    mask, values = torch.ones(4, 500, dtype=torch.bool), size * torch.randn(4, 500, generator=torch.manual_seed(0))
    rewards = torch.zeros(4, 500)
    rewards[:, -1] = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    _, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert -1e12 < explained_variance(values, returns, rewards, mask) < -1e5


def step(sums: dict[str, float], *, loss: float, norm: float, lr: float, **maxima: float) -> Update:
    return Update(norm, lr, skipped=False, loss=loss, sums=sums, maxima=maxima, sent=SentBytes())


def test_update_metrics() -> None:
    learned = UpdateMetrics()
    for tokens, ratio, largest in ((10, 10.0, 0.1), (30, 33.0, 0.5)):
        sums = {"ratio": ratio, "entropy": 60.0}
        policy = step(sums, loss=float(tokens), norm=1.0, lr=1.0 / tokens, largest=largest)
        critic = step({"error": 30.0}, loss=2.0 * tokens, norm=3.0, lr=2.0 / tokens)
        learned.add(tokens, policy, critic)
    expected = {"policy_loss": 20.0, "value_loss": 40.0, "grad_norm": 1.0, "critic_grad_norm": 3.0}
    expected |= {"entropy": 4.0, "error": 2.0, "first_ratio": 1.0, "first_ratio_max_deviation": 0.1}
    assert learned.summary() == pytest.approx(expected | {"lr": 1 / 30, "critic_lr": 2 / 30})
    warming = UpdateMetrics()
    warming.add(10, None, step({}, loss=2.0, norm=3.0, lr=0.5))
    assert warming.summary() == {"lr": 0.0, "value_loss": 2.0, "critic_grad_norm": 3.0, "critic_lr": 0.5}
