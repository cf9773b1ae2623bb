"""Compute how often a pair judge prefers a model's answers to those of SFT: plain, and with the length controlled, of
one run or over several seeds.

- A pair is a win or a loss only if both orders of the two answers agree; otherwise it is a tie and counts half (Zheng
  et al., 2023, arXiv:2306.05685).
- The length-controlled rate is the one of answers of equal length, by a logistic regression of the outcome on the
  difference of the lengths (Dubois et al., 2024, arXiv:2404.04475). Their terms for the instruction and for other
  models are left out, because one pair of models does not determine them.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.intervals import mean_interval, mean_over_seeds, shared_prompts, t_quantile, wilson_interval
from pipeline.evaluation.samples import Sample

Array = npt.NDArray[Any]
RIDGE = 0.01
"""The weight of the squared coefficient of the length, which keeps it finite if the length decides every pair.

The ridge is a normal prior of the coefficient with the variance 1 / RIDGE. The interval includes this uncertainty."""
NEWTON_STEPS = 50
MOST_UNUSABLE = 0.1
"""The largest share of pairs without a usable verdict that still allows a verdict on the run."""


@dataclass(frozen=True)
class Rate:
    """A win rate with its 95% interval. Ties count half."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class WinRate:
    """The comparison of a model with SFT by a pair judge, in one run or over several seeds.

    plain, controlled: the win rate, and the win rate of answers of equal length
    unusable: pairs for which the judge gave no usable verdict in at least one order; no rate includes them
    inconsistent: ties in which the two orders contradict each other
    by_seed: over several seeds, the comparison of each seed in the order of the runs; the intervals of `plain` and
        `controlled` then also cover other seeds
    """

    plain: Rate
    controlled: Rate
    wins: int
    ties: int
    losses: int
    unusable: int
    inconsistent: int
    by_seed: "Sequence[WinRate]" = ()

    @property
    def pairs(self) -> int:
        return self.wins + self.ties + self.losses


def win_rate(samples: Sequence[Sample], model: str) -> WinRate | None:
    """Return the win rate of `model` against SFT; None without a pair with usable verdicts in both orders."""
    compared, unusable = _compare(samples, model)
    if not compared:
        return None
    outcomes = [won for _, won, _ in compared]
    differences = [float(len(sample.answers[model]) - len(sample.answers["sft"])) for sample, _, _ in compared]
    return WinRate(
        Rate(statistics.fmean(outcomes), *wilson_interval(sum(outcomes), len(outcomes))),
        length_controlled(outcomes, differences),
        outcomes.count(1.0),
        outcomes.count(0.5),
        outcomes.count(0.0),
        unusable,
        sum(contradicts for _, _, contradicts in compared),
    )


def _compare(samples: Sequence[Sample], model: str) -> tuple[list[tuple[Sample, float, bool]], int]:
    """Return the pairs with usable verdicts in both orders, and the number of the other pairs.

    Each pair has its outcome, and whether the two orders contradict each other.
    """
    compared, unusable = [], 0
    for sample in samples:
        if model not in sample.preferences or "sft" not in sample.answers:
            continue
        first, second = sample.preferences[model]
        if first is None or second is None:
            unusable += 1
        else:
            compared.append((sample, outcome(first, second), (first - 0.5) * (second - 0.5) < 0))
    return compared, unusable


def pool_wins(samples_by_seed: Sequence[Sequence[Sample]], model: str) -> WinRate | None:
    """Return the win rate of `model` over all seeds, or in one run.

    Return None unless each of several seeds has two pairs with verdicts.
    """
    by_seed = [found for samples in samples_by_seed if (found := win_rate(samples, model)) is not None]
    if len(by_seed) < len(samples_by_seed) or (len(by_seed) > 1 and min(found.pairs for found in by_seed) < 2):
        return None
    if len(by_seed) == 1:
        return by_seed[0]
    compared = [_compare(samples, model)[0] for samples in samples_by_seed]
    outcomes = [{sample.prompt: won for sample, won, _ in of_seed} for of_seed in compared]
    over = mean_over_seeds(outcomes)
    mean, low, high = mean_interval([found.controlled.mean for found in by_seed])
    # The spread between these seeds does not show that of other prompts, and it may be 0 by chance.
    noise = statistics.fmean if shared_prompts(outcomes) else _independent
    low = min(low, mean - noise([found.controlled.mean - found.controlled.low for found in by_seed]))
    high = max(high, mean + noise([found.controlled.high - found.controlled.mean for found in by_seed]))
    counts = {
        kind: sum(getattr(found, kind) for found in by_seed)
        for kind in ("wins", "ties", "losses", "unusable", "inconsistent")
    }
    plain, controlled = _bounded(over.mean, over.low, over.high), _bounded(mean, low, high)
    return WinRate(plain, controlled, **counts, by_seed=by_seed)


def _independent(halves: Sequence[float]) -> float:
    """Return the half width of the interval of a mean, from those of its independent parts."""
    return math.hypot(*halves) / len(halves)


def _bounded(mean: float, low: float, high: float) -> Rate:
    return Rate(mean, max(0.0, low), min(1.0, high))


def describe_wins(wins: WinRate, label: str, start: str) -> str:
    """Return a win rate as text: plain, length-controlled, and the verdicts that were not usable.

    label, start: the names of the model and of the model that it is compared with
    """
    plain, controlled = wins.plain, wins.controlled
    the = f"Over {len(wins.by_seed)} seeds, the" if wins.by_seed else "The"
    unusable = f" {wins.unusable} more pairs have no usable verdict and are left out." if wins.unusable else ""
    return (
        f"{the} pair judge prefers the answers of {label} to those of {start} in {plain.mean:.0%} of {wins.pairs} "
        f"pairs (95% interval {plain.low:.0%} to {plain.high:.0%}), and in {controlled.mean:.0%} at equal length "
        f"({controlled.low:.0%} to {controlled.high:.0%}). Ties count half: {wins.wins} wins, {wins.ties} ties, "
        f"{wins.losses} losses; in {wins.inconsistent} ties the two orders contradict each other.{unusable}"
    )


def outcome(first: float, second: float) -> float:
    """Return 1 for a win, 0 for a loss and 0.5 for a tie, from the verdicts on an answer in both orders."""
    if first > 0.5 and second > 0.5:
        return 1.0
    return 0.0 if first < 0.5 and second < 0.5 else 0.5


def length_controlled(outcomes: Sequence[float], differences: Sequence[float]) -> Rate:
    """Return the win rate of answers of equal length.

    outcomes: (N,) 1, 0.5 or 0; differences: (N,) length of the answer minus length of the other answer

    The model is P(win) = sigmoid(a + b x) with x = tanh(difference / standard deviation of the differences), and the
    rate is sigmoid(a). The interval uses the robust covariance, which also fits ties (Papke & Wooldridge, 1996), and
    Student's t with N - 2 degrees of freedom. The variance of two more pairs without a tie is added, because the
    residuals of a few pairs among many ties underestimate it (Agresti & Min, 2005, doi:10.1002/sim.1781, add one pair
    to a Wald interval). If the differences or the outcomes are all equal, the length explains nothing, and the result
    is the plain rate with Wilson's interval. If all answers are longer (or all shorter), the interval is 0 to 1.
    """
    count, spread = len(outcomes), statistics.pstdev(differences)
    plain = Rate(statistics.fmean(outcomes), *wilson_interval(sum(outcomes), count))
    if count < 3 or len(set(outcomes)) == 1 or spread == 0:
        one_sided = min(differences) > 0 or max(differences) < 0
        return Rate(plain.mean, 0.0, 1.0) if one_sided else plain
    x = np.stack([np.ones(count), np.tanh(np.array(differences) / spread)], axis=1)  # (N, 2)
    y, ridge = np.array(outcomes), np.diag([0.0, RIDGE])
    coefficients = np.zeros(2)  # a, b
    for _ in range(NEWTON_STEPS):
        wins = _sigmoid(x @ coefficients)
        gradient = x.T @ (y - wins) - ridge @ coefficients
        step = np.linalg.solve(_hessian(wins, x) + ridge, gradient)
        coefficients += step / max(1.0, abs(step).max())  # at most 1 per step, because far steps may diverge
        if abs(step).max() < 1e-10:
            break
    wins = _sigmoid(x @ coefficients)
    meat = x.T @ (x * ((y - wins) ** 2)[:, None]) + ridge  # without pairs of equal length, b is a guess
    a = coefficients[0]
    meat[0, 0] += 2 * _sigmoid(a) * _sigmoid(-a)
    inverse = np.linalg.inv(_hessian(wins, x) + ridge)
    half = t_quantile(count - 2) * math.sqrt((inverse @ meat @ inverse)[0, 0])
    return Rate(*(float(_sigmoid(value)) for value in (a, a - half, a + half)))


def _hessian(wins: Array, x: Array) -> Array:
    """Return the negative second derivative (2, 2) of the log-likelihood, from P(win) (N,) and x (N, 2)."""
    return x.T @ (x * (wins * (1 - wins))[:, None])


def _sigmoid(values: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -values))
