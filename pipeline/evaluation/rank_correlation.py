"""Spearman's rank correlation of two kinds of grades."""

import math
from collections.abc import Sequence


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation (ties get their mean rank); None below three pairs or for a constant."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    ranks_x, ranks_y = ranks(x), ranks(y)
    middle = (len(x) + 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(ranks_x, ranks_y, strict=True))
    spread_x = sum((a - middle) ** 2 for a in ranks_x)
    spread_y = sum((b - middle) ** 2 for b in ranks_y)
    return covariance / math.sqrt(spread_x * spread_y)


def correlation_interval(correlation: float, count: int) -> tuple[float, float]:
    """Return the ends of the 95% interval of a rank correlation over `count` pairs, -1 and 1 for fewer than four.

    Fisher's transformation with the variance 1.06 / (n - 3) (Fieller, Hartley & Pearson, 1957,
    doi:10.1093/biomet/44.3-4.470).
    """
    if count < 4:
        return -1.0, 1.0
    middle = math.atanh(max(-0.999999, min(0.999999, correlation)))
    half = 1.959964 * math.sqrt(1.06 / (count - 3))
    return math.tanh(middle - half), math.tanh(middle + half)


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1 for the smallest. Ties get their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for at in order[start:end]:
            ranks[at] = (start + 1 + end) / 2
        start = end
    return ranks
