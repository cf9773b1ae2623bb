import math

import numpy as np
import pytest

from pipeline.report.verdict import mean_interval, paired_difference, t_quantile


def test_paired_difference_agrees_with_the_normal_interval() -> None:
    noise = np.random.default_rng(5)
    before = noise.normal(0.4, 0.3, 400)
    after = before + noise.normal(0.1, 0.2, 400)
    difference = after - before
    mean, low, high = paired_difference(before.tolist(), after.tolist())
    half = 1.959964 * difference.std(ddof=1) / math.sqrt(400)
    assert mean == pytest.approx(difference.mean(), abs=1e-12)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.01 * half)


def test_pairing_is_what_makes_a_difference_clear() -> None:
    before = [float(n) for n in range(50)]
    after = [value + 0.5 + (0.1 if at % 2 else -0.1) for at, value in enumerate(before)]
    _, low, high = paired_difference(before, after)
    assert 0.4 < low < 0.5 < high < 0.6
    _, low_unpaired, high_unpaired = mean_interval(after)
    assert high_unpaired - low_unpaired > 5


@pytest.mark.parametrize("size", [8, 60])
def test_the_interval_covers_the_true_mean_in_95_of_100_samples(size: int) -> None:
    """A percentile bootstrap covers it in 88 to 92 of 100 samples of 8 values."""
    noise = np.random.default_rng(11)
    hits = 0
    for _ in range(4000):
        _, low, high = mean_interval(noise.normal(0.0, 1.0, size).tolist())
        hits += low < 0.0 < high
    assert hits / 4000 == pytest.approx(0.95, abs=0.011)  # three standard errors


def test_quantiles_of_the_t_distribution() -> None:
    """The values of a printed table (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2)."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 7: 2.365, 10: 2.228, 30: 2.042, 100: 1.984}
    for freedom, quantile in table.items():
        assert t_quantile(freedom) == pytest.approx(quantile, rel=2e-3)


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
