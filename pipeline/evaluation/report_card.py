"""The report card of a reward model, as one JSON object (card.json): how far its scores deserve trust.

The functions take scores and return JSON. A share has Wilson's 95% interval. A part without data is None.
"""

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from pipeline.evaluation.intervals import correlation_interval, grouped_mean_interval, rank_correlation
from pipeline.evaluation.pair_accuracy import Card, Scored, share

CONFIDENCE_BINS = 5
LENGTH_GROUPS = 4


@dataclass(frozen=True)
class Judged:
    """An answer with the score of the reward model and the gold score of the judge. `prompt` identifies its prompt."""

    prompt: Hashable
    score: float
    gold: float


def calibration(scored: Sequence[Scored]) -> Card | None:
    """Return the reliability of sigmoid(margin), the model's probability that the chosen answer is preferred.

    The margin of a pair is the score of the chosen answer minus that of the rejected answer.
    The model predicts the answer with the higher score, with the confidence sigmoid(|margin|) from 0.5 to 1. A bin
    compares the mean confidence with the share of right predictions. "error" is the expected calibration error: the
    mean of |confidence - accuracy| over the bins, weighted by their counts (Guo et al., 2017, arXiv:1706.04599, eq. 3).
    """
    if not scored:
        return None
    by_bin: dict[int, list[tuple[float, Scored]]] = {}
    for each in scored:
        confidence = 1 / (1 + math.exp(-abs(each.chosen - each.rejected)))
        number = min(CONFIDENCE_BINS - 1, int((confidence - 0.5) * 2 * CONFIDENCE_BINS))
        by_bin.setdefault(number, []).append((confidence, each))
    bins = []
    for _, members in sorted(by_bin.items()):
        found = share([each.right for _, each in members], [each.group for _, each in members])
        bins.append({"confidence": statistics.fmean(confidence for confidence, _ in members), **(found or {})})
    error = sum(one["count"] * abs(one["confidence"] - one["share"]) for one in bins) / len(scored)
    return {"error": error, "bins": bins}


def margin_by_length(scored: Sequence[Scored]) -> list[Card]:
    """Return the mean margin by the length of the chosen answer less that of the rejected answer, in tokens.

    The pairs are divided at the quartiles of this difference. A model that scores length has margins that grow with it.
    """
    ordered = sorted(scored, key=lambda each: each.extra_tokens)
    cuts = [round(len(ordered) * number / LENGTH_GROUPS) for number in range(LENGTH_GROUPS + 1)]
    groups = []
    for members in (ordered[start:end] for start, end in pairwise(cuts) if end > start):
        margins = [each.chosen - each.rejected for each in members]
        mean, low, high = grouped_mean_interval(margins, [each.group for each in members])
        groups.append(
            {
                "extra_tokens": statistics.fmean(each.extra_tokens for each in members),
                "margin": mean,
                "low": None if math.isnan(low) else low,
                "high": None if math.isnan(high) else high,
                "count": len(members),
            }
        )
    return groups


def agreement(judged: Sequence[Judged]) -> Card | None:
    """Return how far the scores agree with a judge: the rank correlation over the answers, and the share of pairs.

    The correlation uses the first answer to each prompt, because its interval needs independent answers. A pair has two
    answers to the same prompt with different gold scores. The scores agree if they rank the pair alike.
    """
    if not judged:
        return None
    by_prompt: dict[Hashable, list[Judged]] = {}
    for each in judged:
        by_prompt.setdefault(each.prompt, []).append(each)
    pairs = [
        pair for answers in by_prompt.values() for pair in combinations(answers, 2) if pair[0].gold != pair[1].gold
    ]
    agrees = [(a.score - b.score) * (a.gold - b.gold) > 0 for a, b in pairs]
    first = [answers[0] for answers in by_prompt.values()]
    correlation = rank_correlation([each.score for each in first], [each.gold for each in first])
    low, high = (None, None) if correlation is None else correlation_interval(correlation, len(first))
    return {
        "answers": len(first),
        "rank_correlation": correlation,
        "rank_correlation_low": low,
        "rank_correlation_high": high,
        "same_prompt": share(agrees, [a.prompt for a, _ in pairs]),  # three answers to a prompt make three pairs
    }


def level(scores: Sequence[float]) -> Card | None:
    """Return mean, standard deviation and number of scores."""
    if not scores:
        return None
    return {"mean": statistics.fmean(scores), "std": statistics.pstdev(scores), "count": len(scores)}


def changed_answers(pairs: Sequence[Scored], changed: Sequence[float], *, penalty: float = 0.0) -> Card | None:
    """Return the level of changed answers, and the share that scores above the complete answer to the same prompt.

    pairs: the chosen answers are the complete ones
    penalty: subtracted from the scores of the changed answers before the comparison
    """
    found = level(changed)
    if found is None:
        return None
    above = [new - penalty > pair.chosen for pair, new in zip(pairs, changed, strict=True)]
    return {**found, "penalty": penalty, "above_complete": share(above, [pair.group for pair in pairs])}
