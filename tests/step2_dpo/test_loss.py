"""Losses of DPO against numbers by hand."""

import math

import pytest
import torch

from step2_dpo.loss import (
    apo_zero_loss,
    imitation_loss,
    ipo_loss,
    log_odds,
    log_ratios,
    mean_log_ratios,
    mean_logprobs,
    orpo_loss,
    robust_loss,
    sigmoid_loss,
    simpo_loss,
)


def answers(leads: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores of chosen and rejected answers with these differences."""
    rejected = torch.arange(len(leads)) - 1.0
    return rejected + torch.tensor(leads), rejected


def test_large_leads_stay_finite() -> None:
    assert sigmoid_loss(*answers([-1e4]), beta=0.1, label_smoothing=0.1).item() == pytest.approx(900.0)


def test_robust_by_hand() -> None:
    """At sigmoid(beta * lead) = 3/4 and 20 % wrong labels: (0.8 log(4/3) - 0.2 log 4) / 0.6."""
    actual = robust_loss(*answers([math.log(3) / 0.5]), beta=0.5, label_smoothing=0.2)
    assert actual.item() == pytest.approx((0.8 * math.log(4 / 3) - 0.2 * math.log(4)) / 0.6)


def test_wrong_labels_do_not_change_the_mean_of_the_robust_loss() -> None:
    """A fifth of the labels is wrong: four correct pairs and a flipped one have the loss of five correct pairs."""
    chosen, rejected = torch.tensor([2.0], requires_grad=True), torch.tensor([-1.0])
    noisy = 4 * robust_loss(chosen, rejected, beta=0.5, label_smoothing=0.2)
    noisy = noisy + robust_loss(rejected, chosen, beta=0.5, label_smoothing=0.2)
    clean = 5 * sigmoid_loss(chosen, rejected, beta=0.5, label_smoothing=0.0)
    assert noisy.item() == pytest.approx(clean.item())
    slopes = [torch.autograd.grad(loss, chosen)[0].item() for loss in (noisy, clean)]
    assert slopes[0] == pytest.approx(slopes[1])


def test_apo_zero_by_hand() -> None:
    """Rewards log 3 and -log 3 have the losses 1/4 and 1/4, and a policy equal to the reference has 1/2 and 1/2."""
    chosen, rejected = torch.tensor([math.log(3) / 0.1, 0.0]), torch.tensor([-math.log(3) / 0.1, 0.0])
    assert apo_zero_loss(chosen, rejected, beta=0.1).item() == pytest.approx(1 / 4 + 1 / 4 + 1 / 2 + 1 / 2)


def test_ipo_by_hand() -> None:
    """The target lead is 1 / (2 * 0.1) = 5 nats. Larger and smaller leads have the same loss."""
    assert ipo_loss(*answers([5.0, 3.0, 8.0]), beta=0.1).item() == pytest.approx(0 + 4 + 9)


def test_the_sft_term_is_a_mean_over_each_answers_tokens() -> None:
    assert imitation_loss(torch.tensor([-6.0, -8.0]), torch.tensor([3.0, 2.0])).item() == 2 + 4


def test_scores_by_hand() -> None:
    """Answers of 4 and 2 tokens have likelihoods per token of exp(-0.5) and exp(-3)."""
    numbers = torch.tensor([-2.0, -6.0]), torch.tensor([-6.0, -5.0]), torch.tensor([4.0, 2.0])
    assert log_ratios(*numbers).tolist() == [4.0, -1.0]
    assert mean_log_ratios(*numbers).tolist() == [1.0, -0.5]
    assert mean_logprobs(*numbers).tolist() == [-0.5, -3.0]
    odds = [math.exp(-0.5) / (1 - math.exp(-0.5)), math.exp(-3) / (1 - math.exp(-3))]
    assert log_odds(*numbers).exp().tolist() == pytest.approx(odds, rel=1e-5)


def test_odds_of_a_certain_answer_are_finite() -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    odds = log_odds(logprobs, torch.zeros(1), torch.ones(1))
    odds.backward()
    assert odds.item() == pytest.approx(math.log(1e6), rel=1e-3) and logprobs.grad.isfinite().all()


def test_simpo_by_hand() -> None:
    """At beta = 2 and a target of 1, a lead of 1/2 has loss log 2, and no lead has loss -log sigmoid(-1)."""
    actual = simpo_loss(*answers([0.5, 0.0]), beta=2.0, margin=1.0)
    assert actual.item() == pytest.approx(math.log(2) + math.log(1 + math.e))


def test_orpo_by_hand() -> None:
    """Odds that are three times as high give -log(3/4), weighted by 0.1."""
    assert orpo_loss(*answers([math.log(3.0)]), beta=0.1).item() == pytest.approx(0.1 * math.log(4 / 3))
