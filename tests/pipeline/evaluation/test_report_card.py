"""The parts of a reward model's report card against numbers by hand."""

import math

import numpy as np
import pytest

from pipeline.data.encode import PairItem
from pipeline.evaluation.intervals import wilson_interval
from pipeline.evaluation.pair_accuracy import Scored, accuracy
from pipeline.evaluation.report_card import (
    Judged,
    agreement,
    calibration,
    changed_answers,
    level,
    margin_by_length,
)


def scored(margin: float, extra: int = 0, source: str = "a", conversation: bytes | None = None) -> Scored:
    """Return a pair with this margin whose chosen answer has `extra` more tokens than the rejected answer."""
    sides = np.zeros(20 + extra, dtype=np.int32), np.zeros(20, dtype=np.int32)
    return Scored(PairItem(*sides, 0.0, source, 2, conversation), 1.0 + margin, 1.0)


def interval(successes: int, count: int) -> dict[str, object]:
    low, high = wilson_interval(successes, count)
    return {"share": successes / count, "low": low, "high": high, "count": count}


def test_accuracy_by_source_and_by_which_answer_is_longer() -> None:
    pairs = [scored(1, 3), scored(-1, 2), scored(2, -1, "b"), scored(0, -4, "b"), scored(1, 0, "b")]
    assert accuracy(pairs) == {
        "all": interval(3, 5),  # a tie is not a success
        "by_source": {"a": interval(1, 2), "b": interval(2, 3)},
        "chosen_longer": interval(1, 2),
        "rejected_longer": interval(1, 2),
    }
    assert accuracy([]) == {"all": None, "by_source": {}, "chosen_longer": None, "rejected_longer": None}


def test_calibration_by_hand() -> None:
    """sigmoid(ln 1.6) = 0.615 is in the second of the bins 0.5, 0.6, ..., 1; sigmoid(ln 19) = 0.95 in the last."""
    margins = [math.log(1.6), -math.log(1.6), math.log(19), math.log(19), -math.log(19), math.log(19)]
    actual = calibration([scored(margin) for margin in margins])
    assert actual is not None
    first, last = actual["bins"]
    assert first == {"confidence": pytest.approx(1.6 / 2.6), **interval(1, 2)}
    assert last == {"confidence": pytest.approx(0.95), **interval(3, 4)}
    assert actual["error"] == pytest.approx((2 * abs(1.6 / 2.6 - 0.5) + 4 * abs(0.95 - 0.75)) / 6)
    assert calibration([]) is None
    # The last bin includes a confidence of 1.
    huge = calibration([scored(margin) for margin in (800.0, -800.0, math.log(19))])
    assert huge is not None and huge["error"] == pytest.approx(2.95 / 3 - 2 / 3) and len(huge["bins"]) == 1


def test_margins_by_quartile_of_the_difference_in_length() -> None:
    extras = [-3, 5, -1, 0, 2, -2, 7, 1]
    groups = margin_by_length([scored(0.5 * extra, extra) for extra in extras])
    assert [(group["extra_tokens"], group["margin"], group["count"]) for group in groups] == [
        (-2.5, -1.25, 2), (-0.5, -0.25, 2), (1.5, 0.75, 2), (6.0, 3.0, 2),
    ]  # fmt: skip
    # The margins -1.5 and -1.0: t with one degree of freedom is 12.7062, the standard error 0.25.
    assert groups[0]["low"] == pytest.approx(-1.25 - 12.7062 * 0.25, rel=1e-5)
    (single,) = margin_by_length([scored(1.0, 2)])
    assert single == {"extra_tokens": 2.0, "margin": 1.0, "low": None, "high": None, "count": 1}
    assert margin_by_length([]) == []


def test_agreement_with_the_judge_by_hand() -> None:
    """Ranks 1 2 3 4 against 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6. Second answers to x and y count in pairs only."""
    first = [Judged("w", 0.1, 0.3), Judged("x", 0.2, 0.1), Judged("y", 0.3, 0.9), Judged("z", 0.4, 0.5)]
    actual = agreement([*first, Judged("x", 0.9, 0.2), Judged("y", 0.5, 0.8), Judged("z", 0.0, 0.5)])
    assert actual is not None
    half = 1.959964 * math.sqrt(1.06)
    assert actual["rank_correlation"] == pytest.approx(0.6) and actual["answers"] == 4
    assert actual["rank_correlation_low"] == pytest.approx(math.tanh(math.atanh(0.6) - half))
    assert actual["rank_correlation_high"] == pytest.approx(math.tanh(math.atanh(0.6) + half))
    assert actual["same_prompt"] == interval(1, 2)  # x agrees, y disagrees, and z has equal gold scores
    assert agreement([]) is None


def test_pairs_of_one_prompt_are_not_independent() -> None:
    """Three answers to each of four prompts make twelve pairs. The scores rank all pairs of two prompts rightly."""
    ranked = [Judged(prompt, score, gold) for prompt, scores in (("w", (1, 2, 3)), ("x", (4, 5, 6)), ("y", (3, 2, 1)),
              ("z", (6, 5, 4))) for score, gold in zip(scores, (0.1, 0.2, 0.3), strict=True)]  # fmt: skip
    actual = agreement(ranked)
    assert actual is not None
    pairs = actual["same_prompt"]
    assert (pairs["share"], pairs["count"]) == (0.5, 12)
    # The variance of the share is 4/3 * 4 * (3 - 1.5)^2 / 12^2 = 1/12, that of three independent outcomes.
    assert (pairs["low"], pairs["high"]) == pytest.approx(wilson_interval(1.5, 3))


def test_changed_answers_are_compared_with_the_complete_ones() -> None:
    complete = [scored(score - 1.0) for score in (0.0, 1.0, 2.0, 3.0)]
    actual = changed_answers(complete, [0.5, 1.5, 1.0, 5.0], penalty=1.0)
    assert actual == {"mean": 2.0, "std": pytest.approx(math.sqrt((1.5**2 + 0.5**2 + 1 + 9) / 4)), "count": 4,
                     "penalty": 1.0, "above_complete": interval(1, 4)}  # fmt: skip
    without = changed_answers(complete, [0.5, 1.5, 1.0, 5.0])
    assert without is not None and without["above_complete"] == interval(3, 4)
    assert changed_answers([], []) is None and level([]) is None


def test_every_share_of_pairs_takes_conversations_as_the_sample() -> None:
    """Two conversations with four pairs each count as two outcomes if all their pairs are alike."""
    pairs = [scored(2.0, conversation=b"a")] * 4 + [scored(2.0, conversation=b"b")] * 4
    found, cut = calibration(pairs), changed_answers(pairs, [9.0] * 8)
    assert found is not None and cut is not None
    for each in (accuracy(pairs)["all"], found["bins"][0], cut["above_complete"]):
        assert (each["low"], each["high"], each["count"]) == (*wilson_interval(2, 2), 8)
