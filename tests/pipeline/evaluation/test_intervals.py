import math
import statistics

import pytest

from pipeline.evaluation.intervals import (
    best_against_last,
    grouped_mean_interval,
    grouped_share_interval,
    mean_interval,
    mean_over_seeds,
    paired_difference,
    rank_correlation,
    shared_prompts,
    t_quantile,
    wilson_interval,
)


def test_a_paired_difference_by_hand() -> None:
    """The differences 1, 2, 3 have the deviation 1. The values themselves differ much more."""
    mean, low, high = paired_difference([10.0, 20.0, 60.0], [11.0, 22.0, 63.0])
    half = 4.302653 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), rel=1e-4)
    mean, low, high = paired_difference([0.25], [0.75])
    assert mean == 0.5 and math.isnan(low) and math.isnan(high)
    with pytest.raises(ValueError, match="longer"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        paired_difference([], [])


def test_quantiles_of_the_t_distribution() -> None:
    """Compare with the table in the NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 7: 2.365, 10: 2.228, 30: 2.042, 100: 1.984}
    for freedom, quantile in table.items():
        assert t_quantile(freedom) == pytest.approx(quantile, rel=2e-3)
    for freedom, quantile in {1: 318.313, 2: 22.327, 10: 4.144, 30: 3.385, 100: 3.174}.items():
        assert t_quantile(freedom, 0.998) == pytest.approx(quantile, rel=4e-3)


def test_wilsons_interval_by_hand() -> None:
    """Compare 8 of 10 and 0 of n with Wilson's formula for z = 1.959964."""
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 1.959964**2 / (10 + 1.959964**2)), abs=1e-6)
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert wilson_interval(4.5, 9) == pytest.approx((0.5 - 0.273470, 0.5 + 0.273470), abs=1e-5)
    with pytest.raises(ValueError, match="no values"):
        wilson_interval(0, 0)


def test_the_interval_of_grouped_outcomes_by_hand() -> None:
    """2, 0 and 2 of 2: the share 2/3 has the variance 3/2 (4/9 + 16/9 + 4/9) / 36 = 1/9, that of 2 outcomes."""
    outcomes = [True, True, False, False, True, True]
    assert grouped_share_interval(outcomes, "aabbcc") == pytest.approx(wilson_interval(4 / 3, 2))
    assert grouped_share_interval(outcomes, "abcdef") == wilson_interval(4, 6)
    assert grouped_share_interval([True] * 6, "aabbcc") == wilson_interval(3, 3)


def test_the_interval_of_a_grouped_mean_by_hand() -> None:
    """Sums of residuals 2, -4 and 2 of the mean 2: the variance of the mean is 3/2 (4 + 16 + 4) / 36 = 1."""
    values = [3.0, 3.0, 0.0, 0.0, 4.0, 2.0]
    assert grouped_mean_interval(values, "aabbcc") == pytest.approx((2.0, 2.0 - 4.302653, 2.0 + 4.302653), rel=1e-5)
    assert grouped_mean_interval(values, "abcdef") == pytest.approx(mean_interval(values))
    assert math.isnan(grouped_mean_interval(values, "aaaaaa")[1])


def test_seeds_with_different_prompts_by_hand() -> None:
    """Seed means 2, 4, 9 give mean 5 and standard error sqrt(13 / 3). Mean squares: within 2, between 2 * 13 = 26."""
    actual = mean_over_seeds([{"a": 1.0, "b": 3.0}, {"c": 3.0, "d": 5.0}, {"e": 8.0, "f": 10.0}])
    half = 4.302653 * math.sqrt(13 / 3)
    assert (actual.mean, actual.low, actual.high) == pytest.approx((5.0, 5.0 - half, 5.0 + half), rel=1e-4)
    assert actual.seed_deviation == pytest.approx(math.sqrt((26 - 2) / 2))
    assert actual.prompt_deviation == pytest.approx(math.sqrt(2))


def test_seeds_whose_means_are_equal_by_chance_keep_the_noise_of_their_prompts() -> None:
    """Both means are 2, and the mean square within the seeds is 2 with 2 degrees of freedom: 4.302653 sqrt(2 / 4)."""
    actual = mean_over_seeds([{"a": 1.0, "b": 3.0}, {"c": 1.0, "d": 3.0}])
    half = 4.302653 * math.sqrt(2 / 4)
    assert (actual.mean, actual.low, actual.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), rel=1e-5)


def test_seeds_with_the_same_prompts_by_hand() -> None:
    """Rows 1 2 6 and 3 6 6: seed means 3 and 5, prompt means 2, 4, 6; squares 6, 8 and 2."""
    actual = mean_over_seeds([{"a": 1.0, "b": 2.0, "c": 6.0}, {"c": 6.0, "b": 6.0, "a": 3.0}])
    square = 6 + 8 - 2
    freedom = math.floor(square**2 / (6**2 / 1 + 8**2 / 2 + 2**2 / 2))  # 144 / 70 = 2.06
    assert freedom == 2
    half = 4.302653 * math.sqrt(square / 6)
    assert (actual.mean, actual.low, actual.high) == pytest.approx((4.0, 4.0 - half, 4.0 + half), rel=1e-4)
    assert actual.seed_deviation == pytest.approx(math.sqrt((6 - 2) / 3))
    assert actual.prompt_deviation == pytest.approx(math.sqrt((8 - 2) / 2 + 2))
    with pytest.raises(ValueError, match="at least two seeds"):
        mean_over_seeds([{"a": 1.0, "b": 2.0}])


def test_seeds_that_share_most_prompts_do_not_hide_the_spread_of_prompts() -> None:
    """Three equal seeds, of which one lacks the last prompt: eight prompts, as if there were one seed."""
    values = [0.0, 0.5, 1.0, 0.0, 1.0, 0.5, 0.5, 0.9, 0.55]
    rows = [dict(enumerate(values)), dict(enumerate(values)), dict(enumerate(values[:8]))]
    actual = mean_over_seeds(rows)
    half = 2.364624 * statistics.stdev(values[:8]) / 8**0.5
    mean = (2 * 4.95 / 9 + 4.4 / 8) / 3
    assert (actual.mean, actual.low, actual.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-4)
    few = [dict(enumerate(values)), {at + 5: value for at, value in enumerate(values)}]  # four of nine are shared
    assert shared_prompts(few) == [] and shared_prompts(rows) == list(range(8))


def test_the_best_step_is_selected_on_other_prompts_by_hand() -> None:
    """Step 1 is best on the odd prompts and step 2 on the even prompts. Each is compared on the other half."""
    steps = [(1, [0.0, 1.0] * 4), (2, [0.6, 0.0] * 4), (3, [0.3, 0.3] * 4)]
    actual = best_against_last(steps, fewest=8)
    assert actual is not None
    # Odd prompts select step 1, which has 0 on the even prompts: 0.3. Even prompts select step 2: 0.3 on odd prompts.
    assert (actual.best, actual.last, actual.best_mean, actual.last_mean) == (1, 3, 0.5, 0.3)
    assert (actual.mean, actual.low, actual.high) == pytest.approx((0.3, 0.3, 0.3))
    assert best_against_last(steps[:1], fewest=8) is None
    assert best_against_last([(1, [0.0] * 4), (2, [1.0] * 4)], fewest=8) is None
    assert best_against_last([(1, [0.0] * 8), (2, [1.0] * 9)], fewest=8) is None


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5.
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None
