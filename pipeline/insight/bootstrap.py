"""What a mean over held-out prompts, or a difference between two models, is worth: bootstrap intervals."""

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 4_000


def paired_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Mean of `after - before` over prompts, and its 95% interval.

    The percentile bootstrap over prompts (Efron & Tibshirani, 1993, chapter 13) with a fixed seed: it says how far
    the mean would move with other held-out prompts, not with another training seed. One prompt gives no interval (nan).
    Raises ValueError without values, or where they are not equally many.
    """
    if len(before) != len(after):
        raise ValueError(f"a paired difference needs equally many values, not {len(before)} and {len(after)}")
    return bootstrap_mean(np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64))


def bootstrap_mean(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean of `values` (N,) and its 95% percentile bootstrap interval. Raises ValueError without values."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("the mean of no values is undefined")
    mean = float(sample.mean())
    if sample.size == 1:
        return mean, math.nan, math.nan
    # Drawing how often each value is taken, instead of which, keeps this at (RESAMPLES, N) small integers.
    counts = np.random.default_rng(0).multinomial(sample.size, np.full(sample.size, 1 / sample.size), RESAMPLES)
    low, high = np.percentile(counts @ sample / sample.size, [2.5, 97.5])
    return mean, float(low), float(high)
