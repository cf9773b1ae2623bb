"""The win rate by a pair judge, plain and length-controlled, against closed forms; valid verdicts."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.records import Message
from pipeline.evaluation.intervals import wilson_interval
from pipeline.evaluation.samples import Sample, read_samples, write_samples
from pipeline.report.report import render_report
from pipeline.report.verdict import judge
from pipeline.report.win_rate import Rate, length_controlled, outcome, win_rate
from tests.pipeline.report.example_runs import run_of
from tests.pipeline.report.test_report import check

Pair = tuple[float | None, float | None]


def judged(verdicts: list[Pair], extra: int = 0) -> list[Sample]:
    """Return answers with these verdicts. PPO's answers are `extra` characters longer."""
    return [
        Sample((Message("user", str(at)),), {"sft": "word", "ppo": "word" + "x" * extra}, preferences={"ppo": pair})
        for at, pair in enumerate(verdicts)
    ]


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [(1, 1, 1), (0, 0, 0), (1, 0, 0.5), (0, 1, 0.5), (1, 0.5, 0.5), (0.5, 0.5, 0.5), (0.9, 0.6, 1), (0.4, 0.1, 0)],
)
def test_a_win_needs_both_orders(first: float, second: float, result: float) -> None:
    assert outcome(first, second) == result


def test_pairs_are_counted_by_hand() -> None:
    verdicts: list[Pair] = [(1, 1)] * 6 + [(0, 0)] * 2 + [(1, 0)] * 3 + [(0.5, 0.5)] + [(1, None), (None, None)]
    actual = win_rate(judged(verdicts), "ppo")
    assert actual is not None
    assert (actual.wins, actual.ties, actual.losses, actual.inconsistent, actual.unusable) == (6, 4, 2, 3, 2)
    assert actual.plain.mean == pytest.approx(8 / 12)
    assert (actual.plain.low, actual.plain.high) == pytest.approx(wilson_interval(8, 12))
    assert actual.controlled == actual.plain  # all answers have the same difference in length
    assert win_rate(judged([(None, None)] * 9), "ppo") is None
    assert win_rate(judged([]), "ppo") is None and win_rate(judged(verdicts), "dpo") is None


def test_two_groups_of_lengths_have_a_closed_form() -> None:
    """With the lengths -1 and +1 only, each group fits its own rate, 2 of 8 and 7 of 8, except for the small ridge."""
    outcomes = [1.0] * 2 + [0.0] * 6 + [1.0] * 7 + [0.0]
    actual = length_controlled(outcomes, [-5.0] * 8 + [5.0] * 8)
    logit = (math.log(2 / 6) + math.log(7 / 1)) / 2
    assert actual.mean == pytest.approx(1 / (1 + math.exp(-logit)), abs=2e-3)
    # Each group's logit has the robust variance 1 / (n p (1 - p)); the intercept is the mean of the two.
    variance = (1 / (8 * 0.25 * 0.75) + 1 / (8 * 0.875 * 0.125)) / 4
    deviation = math.sqrt(variance + variance**2 * 2 * actual.mean * (1 - actual.mean))  # with two more pairs
    low = 1 / (1 + math.exp(-(logit - 2.144787 * deviation)))
    assert actual.low == pytest.approx(low, abs=5e-3)


@pytest.mark.parametrize(("pairs", "share"), [(50, 0.1), (200, 0.05), (100, 0.5)])
@pytest.mark.parametrize("wins", [0.5, 1.0])
def test_the_interval_covers_the_rate_among_many_ties(pairs: int, share: float, wins: float) -> None:
    """`share` of the pairs are no ties, and `wins` of these are wins. The lengths explain nothing."""
    rng = np.random.default_rng(0)
    differences, rate = [-5.0, 5.0] * (pairs // 2), 0.5 + share * (wins - 0.5)
    drawn = rng.multinomial(pairs, [share * wins, share * (1 - wins), 1 - share], size=2000).tolist()
    covered = 0
    for (won, lost, tied), count in Counter(map(tuple, drawn)).items():
        outcomes = rng.permutation([1.0] * won + [0.0] * lost + [0.5] * tied).tolist()
        actual = length_controlled(outcomes, differences)
        covered += count * (actual.low <= rate <= actual.high)
    assert covered / len(drawn) > 0.94


def test_without_pairs_of_about_equal_length_the_rate_at_equal_length_is_unknown() -> None:
    """All answers are 90 to 110 characters longer, and 80% win: length and quality cannot be told apart.

    Here x is 1 for every pair, so a + b is known and b has the prior's deviation of 10: a is logit(0.8) +- 10 t.
    """
    differences = [90.0, 110.0] * 40
    actual = length_controlled(([1.0] * 4 + [0.0]) * 16, differences)
    assert actual.mean == pytest.approx(0.8, abs=2e-3)
    assert actual.low < 1e-6 and actual.high > 1 - 1e-6
    rows = judged(([(1.0, 1.0)] * 4 + [(0.0, 0.0)]) * 16)
    longer = [replace(row, answers={"sft": "word", "ppo": "x" * (94 + 20 * (at % 2))}) for at, row in enumerate(rows)]
    assert judge(run_of(longer)).headline == "The judge prefers PPO to SFT, but not at equal length at temperature 1."


@pytest.mark.parametrize(("extra", "result"), [(0, "good"), (9, "open")])
def test_wins_of_longer_answers_are_not_a_success(extra: int, result: str) -> None:
    actual = win_rate(judged([(1, 1)] * 20, extra), "ppo")
    assert actual is not None and actual.plain.low > 0.8
    assert actual.controlled == (Rate(1.0, 0.0, 1.0) if extra else actual.plain)
    assert judge(run_of(judged([(1, 1)] * 20, extra))).outcome == result


MIXED: list[Pair] = [(1, 1)] * 30 + [(0, 0)] * 4 + [(1, 0)] * 6


@pytest.mark.parametrize(
    ("verdicts", "result", "headline"),
    [
        (MIXED, "good", "The judge prefers PPO to SFT at temperature 1."),
        ([(0, 0)] * 20, "bad", "The judge prefers SFT to PPO at temperature 1."),
        ([(1, 1), (0, 0)] * 12, "open", "The judge sees no clear difference between SFT and PPO at temperature 1."),
        ([(1, 1)] * 5, "open", "No verdict of the judge on PPO at temperature 1."),
        ([*MIXED, *[(None, None)] * 8], "open", "No verdict of the judge on PPO at temperature 1."),
    ],
)
def test_without_gold_the_pairs_decide(verdicts: list[Pair], result: str, headline: str) -> None:
    actual = judge(run_of(judged(verdicts)))
    assert (actual.outcome, actual.headline) == (result, headline)
    assert "Ties count half" in actual.evidence


def test_the_page_shows_both_rates_and_the_unusable_verdicts(tmp_path: Path) -> None:
    rows = judged([*MIXED, (None, 1.0), (None, None)])
    write_samples(tmp_path / "samples.jsonl", rows)
    assert read_samples(tmp_path / "samples.jsonl") == rows
    text = check(render_report(run_of(rows))).text
    for words in ("Length-controlled", "PPO against SFT", "82.5% (68.1% to 91.3%)", "Unusable",
                  "2 more pairs have no usable verdict"):  # fmt: skip
        assert words in text, words
