"""Losses of DPO against numbers worked out by hand."""

import math
import random

import pytest
import torch

from step2_dpo.loss import imitation_loss, ipo_loss, sigmoid_loss


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.2)])
def test_sigmoid(beta: float, smoothing: float) -> None:
    source = random.Random(1)
    leads = [source.gauss(0, 8) for _ in range(50)]
    wanted = 0.0
    for lead in leads:
        right = 1 / (1 + math.exp(-beta * lead))
        wanted -= (1 - smoothing) * math.log(right) + smoothing * math.log(1 - right)
    found = sigmoid_loss(torch.tensor(leads), beta=beta, label_smoothing=smoothing)
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_a_policy_that_is_the_reference_loses_log_two_and_is_pushed_apart() -> None:
    leads = torch.zeros(3, requires_grad=True)
    loss = sigmoid_loss(leads, beta=0.1, label_smoothing=0.0)
    loss.backward()
    assert loss.item() == pytest.approx(3 * math.log(2))
    assert leads.grad.tolist() == pytest.approx([-0.05] * 3)  # beta * (sigmoid - 1)


def test_smoothed_labels_want_a_finite_lead() -> None:
    """Of 20 % wrong labels the best lead is where sigmoid(beta * lead) is 0.8."""
    leads = torch.tensor([math.log(4) / 0.5], requires_grad=True)
    sigmoid_loss(leads, beta=0.5, label_smoothing=0.2).backward()
    assert leads.grad.item() == pytest.approx(0.0, abs=1e-7)


def test_far_apart_answers_stay_finite() -> None:
    assert sigmoid_loss(torch.tensor([-1e4]), beta=0.1, label_smoothing=0.1).item() == pytest.approx(900.0)


def test_ipo_by_hand() -> None:
    """Leads of 1 / (2 * 0.1) = 5 nats are aimed at, and more is as bad as less."""
    assert ipo_loss(torch.tensor([5.0, 3.0, 8.0]), beta=0.1).item() == pytest.approx(0 + 4 + 9)


def test_imitation_is_a_mean_over_each_answers_tokens() -> None:
    assert imitation_loss(torch.tensor([-6.0, -8.0]), torch.tensor([3.0, 2.0])).item() == 2 + 4
