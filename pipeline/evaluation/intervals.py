"""Intervals, of 95% by default: of means, of paired differences, of the last step against the best one, of shares, of a
mean over several training seeds, and of Spearman's rank correlation of two kinds of grades.

Every function takes numbers and returns numbers.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Difference = tuple[float, float, float]
"""The mean of a difference, and the ends of its interval."""
Z = statistics.NormalDist().inv_cdf(0.975)  # -Z to Z contains 95% of a standard normal distribution


def paired_difference(before: Sequence[float], after: Sequence[float], *, confidence: float = 0.95) -> Difference:
    """Return the mean of `after - before` over prompts, and the ends of its interval (see `mean_interval`).

    The interval covers the choice of held-out prompts, but not the training seed.
    Raise ValueError without values or if the lengths differ.
    """
    return mean_interval([new - old for old, new in zip(before, after, strict=True)], confidence=confidence)


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the mean of `values` (N,) and the ends of its t-interval, which also fits small samples.

    With one value the ends are nan. Raise ValueError without values.
    """
    if not values:
        raise ValueError("the mean of no values is undefined")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, math.nan, math.nan
    half = t_quantile(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


@dataclass(frozen=True)
class BestAgainstLast:
    """The paired difference of the last step from the best step, with its 95% interval.

    The best step is selected on one half of the prompts and compared on the other half, in both directions. Otherwise
    the best of many noisy evaluations would look better than it is. `best` and the means use all prompts.
    """

    best: int
    last: int
    best_mean: float
    last_mean: float
    mean: float
    low: float
    high: float


def best_against_last(evaluations: Sequence[tuple[int, Sequence[float]]], *, fewest: int) -> BestAgainstLast | None:
    """Compare the best with the last step. `evaluations` are (step, one value per prompt), in the order of the steps.

    Return None for fewer than two evaluations, fewer than `fewest` prompts, or different numbers of prompts.
    """
    sizes = {len(values) for _, values in evaluations}
    if len(evaluations) < 2 or len(sizes) > 1 or min(sizes) < fewest:
        return None
    last, last_values = evaluations[-1]
    differences = []
    for half in (0, 1):
        _, chosen = max(evaluations, key=lambda one: statistics.fmean(one[1][1 - half :: 2]))
        differences += [end - best for end, best in zip(last_values[half::2], chosen[half::2], strict=True)]
    best, best_values = max(evaluations, key=lambda one: statistics.fmean(one[1]))
    return BestAgainstLast(
        best, last, statistics.fmean(best_values), statistics.fmean(last_values), *mean_interval(differences)
    )


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Return q such that -q to q contains `confidence` of Student's t distribution with `freedom` degrees of freedom.

    One and two degrees of freedom have closed forms. The others use the expansion 26.7.5 of Abramowitz & Stegun, whose
    error is below 0.4% from three degrees on for a confidence of 0.95, and from ten degrees on for 0.998.
    """
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def wilson_interval(successes: float, count: float) -> tuple[float, float]:
    """Return the ends of the 95% interval of a share, `successes / count`, by Wilson's score method.

    The interval stays within [0, 1] and has a width above 0 for shares of 0 and 1 (Wilson, 1927; equation 4 of Brown,
    Cai & DasGupta, 2001, doi:10.1214/ss/1009213286). A tie may count as half a success, which makes the interval
    slightly too wide. `count` may be an effective number of outcomes. Raise ValueError without values.
    """
    if count <= 0:
        raise ValueError("the share of no values is undefined")
    share = successes / count
    middle = (successes + Z**2 / 2) / (count + Z**2)
    half = Z * math.sqrt(count * share * (1 - share) + Z**2 / 4) / (count + Z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


def grouped_share_interval(outcomes: Sequence[bool], groups: Sequence[Hashable]) -> tuple[float, float]:
    """Return the ends of the 95% interval of a share of outcomes that may be alike within groups.

    outcomes: (N,)
    groups: (N,) the group of each outcome, for example its conversation

    It is Wilson's interval for N / d outcomes. The design effect d is the variance of the share with the groups as the
    sample, divided by the variance with N independent outcomes (Rao & Scott, 1992, doi:10.2307/2532311). If all
    outcomes are equal, d is unknown and each group counts once. Raise ValueError without values.
    """
    count, wins, sizes = len(outcomes), sum(outcomes), len(set(groups))
    if sizes == count:
        return wilson_interval(wins, count)
    share = wins / count
    effective = float(sizes)
    if 0 < wins < count and sizes > 1:
        variance = _variance_of_mean(outcomes, groups)
        effective = min(float(count), share * (1 - share) / variance) if variance else float(count)
    return wilson_interval(share * effective, effective)


def grouped_mean_interval(values: Sequence[float], groups: Sequence[Hashable]) -> tuple[float, float, float]:
    """Return the mean of `values` (N,), which may be alike within `groups` (N,), and the ends of its t-interval.

    With one value per group it is that of `mean_interval`, and with one group the ends are nan.
    """
    mean, count = statistics.fmean(values), len(set(groups))
    half = t_quantile(count - 1) * math.sqrt(_variance_of_mean(values, groups)) if count > 1 else math.nan
    return mean, mean - half, mean + half


def _variance_of_mean(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Return the variance of the mean of values with at least two groups as the sample (Rao & Scott, 1992)."""
    mean, residuals = statistics.fmean(values), defaultdict[Hashable, float](float)
    for value, group in zip(values, groups, strict=True):
        residuals[group] += value - mean
    return len(residuals) / (len(residuals) - 1) * sum(each**2 for each in residuals.values()) / len(values) ** 2


def grade_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of `values` (N,) and the ends of its 95% interval: Wilson's if every value is 0 or 1.

    The t-interval of 0 or N right answers has the width 0. Raise ValueError without values.
    """
    if values and set(values) <= {0.0, 1.0}:
        return statistics.fmean(values), *wilson_interval(sum(values), len(values))
    return mean_interval(values)


@dataclass(frozen=True)
class SeedEffect:
    """A mean over several training seeds with its 95% interval, and the spread of its parts.

    seed_deviation: the standard deviation of the seeds' true means; the noise of the prompts is subtracted
    prompt_deviation: the standard deviation of the values of one seed over its prompts
    """

    mean: float
    low: float
    high: float
    seed_deviation: float
    prompt_deviation: float


def mean_over_seeds(values: Sequence[Mapping[Any, float]]) -> SeedEffect:
    """Estimate the mean of a value over training seeds and prompts. `values` has one mapping per seed, by prompt.

    Both seeds and prompts are random samples. The value of seed i and prompt j is y_ij = mean + s_i + p_j + e_ij.

    - If the seeds share n prompts (`shared_prompts`), the mean squares of the two-way layout of k seeds and n prompts
      give Var(mean) = (MS_seed + MS_prompt - MS_error) / (k n), with Satterthwaite's degrees of freedom. Prompts that
      some seeds lack count in the mean only.
    - Otherwise the prompts are nested in the seeds: Var(mean) is the variance of the seeds' means divided by k, with
      k - 1 degrees of freedom. The interval is at least as wide as the noise of the prompts alone makes it: the means
      of two or three seeds may be equal by chance.

    Source: Searle, Casella & McCulloch (1992), Variance Components, chapters 3 and 4; Satterthwaite (1946),
    doi:10.2307/3002019. Raise ValueError with fewer than two seeds, or a seed with fewer than two prompts.
    """
    if len(values) < 2 or min(map(len, values)) < 2:
        raise ValueError("a mean over seeds needs at least two seeds with at least two prompts each")
    nested, shared = _nested([np.array([*seed.values()]) for seed in values]), shared_prompts(values)
    if not shared:
        return nested
    crossed = _crossed(np.array([[seed[prompt] for prompt in shared] for seed in values]))
    half = crossed.high - crossed.mean
    return replace(crossed, mean=nested.mean, low=nested.mean - half, high=nested.mean + half)


def shared_prompts(values: Sequence[Mapping[Any, float]]) -> list[Any]:
    """Return the prompts that all seeds have; none if they are not more than half of the prompts of a seed."""
    shared = [prompt for prompt in values[0] if all(prompt in seed for seed in values)]
    return shared if 2 * len(shared) > max(map(len, values)) else []


def _nested(rows: Sequence[Array]) -> SeedEffect:
    """Estimate the mean over seeds (rows) that have different prompts."""
    k, sizes, means = len(rows), np.array([len(row) for row in rows]), np.array([row.mean() for row in rows])
    total, grand = sizes.sum(), np.concatenate(rows).mean()
    within = sum(((row - own) ** 2).sum() for row, own in zip(rows, means, strict=True)) / (total - k)
    between = (sizes * (means - grand) ** 2).sum() / (k - 1)
    size = (total - (sizes**2).sum() / total) / (k - 1)
    mean, _, high = mean_interval(means.tolist())
    half = max(high - mean, t_quantile(int(total) - k) * math.sqrt(within * (1 / sizes).sum()) / k)
    deviations = math.sqrt(max(0.0, (between - within) / size)), math.sqrt(within)
    return SeedEffect(mean, mean - half, mean + half, *deviations)


def _crossed(values: Array) -> SeedEffect:
    """Estimate the mean over seeds that have the same prompts. `values` is (seeds, prompts)."""
    (k, n), mean = values.shape, float(values.mean())
    seeds, prompts = values.mean(axis=1, keepdims=True), values.mean(axis=0)
    seed, prompt = float(n * seeds.var(ddof=1)), float(k * prompts.var(ddof=1))  # mean squares
    error = float(((values - seeds - prompts + mean) ** 2).sum()) / ((k - 1) * (n - 1))
    # The expectation of the sum is at least that of each mean square, so the estimate is at least as large as both.
    square = max(seed + prompt - error, seed, prompt)
    parts = seed**2 / (k - 1) + prompt**2 / (n - 1) + error**2 / ((k - 1) * (n - 1))
    freedom = max(1, math.floor(square**2 / parts)) if parts else k - 1
    half = t_quantile(freedom) * math.sqrt(square / (k * n))
    deviations = math.sqrt(max(0.0, (seed - error) / n)), math.sqrt(max(0.0, (prompt - error) / k) + error)
    return SeedEffect(mean, mean - half, mean + half, *deviations)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation (ties get their mean rank); None below three pairs or for a constant."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return statistics.correlation(ranks(x), ranks(y))


def correlation_interval(correlation: float, count: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the ends of the interval of a rank correlation over `count` pairs, -1 and 1 for fewer than four.

    Fisher's transformation with the variance 1.06 / (n - 3) (Fieller, Hartley & Pearson, 1957,
    doi:10.1093/biomet/44.3-4.470).
    """
    if count < 4:
        return -1.0, 1.0
    middle = math.atanh(max(-0.999999, min(0.999999, correlation)))
    half = statistics.NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(1.06 / (count - 3))
    return math.tanh(middle - half), math.tanh(middle + half)


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1 for the smallest. Ties get their mean rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + 1 + bisect_right(ordered, value)) / 2 for value in values]
