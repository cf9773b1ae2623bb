import math

import numpy as np
import pytest

from pipeline.report.verdict import bootstrap_mean, paired_difference


def test_paired_difference_agrees_with_the_normal_interval() -> None:
    noise = np.random.default_rng(5)
    before = noise.normal(0.4, 0.3, 400)
    after = before + noise.normal(0.1, 0.2, 400)
    difference = after - before
    mean, low, high = paired_difference(before.tolist(), after.tolist())
    half = 1.959964 * difference.std(ddof=1) / math.sqrt(400)
    assert mean == pytest.approx(difference.mean(), abs=1e-12)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def test_pairing_is_what_makes_a_difference_clear() -> None:
    before = [float(n) for n in range(50)]
    after = [value + 0.5 + (0.1 if at % 2 else -0.1) for at, value in enumerate(before)]
    _, low, high = paired_difference(before, after)
    assert 0.4 < low < 0.5 < high < 0.6
    _, low_unpaired, high_unpaired = bootstrap_mean(after)
    assert high_unpaired - low_unpaired > 5


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    noise = np.random.default_rng(11)
    hits = 0
    for _ in range(60):
        _, low, high = bootstrap_mean(noise.normal(0.0, 1.0, 60))
        hits += low < 0.0 < high
    assert 0.85 < hits / 60 <= 1.0


def test_the_interval_is_the_same_every_time_and_undefined_for_one_prompt() -> None:
    assert paired_difference([0, 1, 2], [1, 1, 5]) == paired_difference([0, 1, 2], [1, 1, 5])
    mean, low, high = paired_difference([0.25], [0.75])
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_a_difference_of_unequal_or_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="equally many values, not 1 and 2"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        paired_difference([], [])
