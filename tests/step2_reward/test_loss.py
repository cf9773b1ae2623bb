"""Bradley-Terry with margin and centring, by hand."""

import math
import random

import pytest
import torch

from step2_reward.loss import bradley_terry_loss


@pytest.mark.parametrize(("centering", "margin"), [(0.0, 0.0), (0.01, 0.0), (0.3, 1.0)])
def test_bradley_terry(centering: float, margin: float) -> None:
    source = random.Random(1)
    pairs = [(source.gauss(0, 2), source.gauss(0, 2), margin * source.random()) for _ in range(50)]
    expected = 0.0
    for chosen, rejected, m in pairs:
        probability = 1 / (1 + math.exp(-(chosen - rejected - m)))
        expected += -math.log(probability) + centering * (chosen + rejected) ** 2
    chosen, rejected, margins = (torch.tensor(column) for column in zip(*pairs, strict=True))
    actual = bradley_terry_loss(chosen, rejected, margins, centering=centering)
    assert actual.item() == pytest.approx(expected, rel=1e-5)


def test_far_apart_scores_stay_finite() -> None:
    loss = bradley_terry_loss(torch.tensor([-500.0]), torch.tensor([500.0]), torch.zeros(1), centering=0.0)
    assert loss.item() == 1000
