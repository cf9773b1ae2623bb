"""Reward gaming: three checks over single answers against numbers by hand, and their part of the page."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data.records import Message
from pipeline.evaluation.intervals import BestAgainstLast, best_against_last
from pipeline.evaluation.samples import Sample
from pipeline.report.data import read_run
from pipeline.report.gaming import (
    Check,
    check_correlation,
    check_last_step,
    check_paired,
    disagreements,
    gaming,
)
from pipeline.report.report import render_report
from tests.pipeline.report.example_runs import update_lines, write_demo_run
from tests.pipeline.report.test_report import check


def changed(rewards: Sequence[float], gold: Sequence[float]) -> list[Sample]:
    """Return answers whose reward and gold scores change by these values from SFT to PPO."""
    return [
        Sample(
            (Message("user", str(at)),),
            {"sft": "a", "ppo": "b"},
            {"sft": 0.0, "ppo": reward},
            {"sft": 0.5, "ppo": 0.5 + rise},
        )
        for at, (reward, rise) in enumerate(zip(rewards, gold, strict=True))
    ]


GOOD, OPEN, BAD = (Check(outcome, outcome) for outcome in ("good", "open", "bad"))


@pytest.mark.parametrize(
    ("rises", "checks", "answer"),
    [
        ((1.0, 1.0), (GOOD, GOOD, GOOD), "No sign of it"),
        ((1.0, None), (GOOD, GOOD, GOOD), "No sign of it"),  # the last step is the best one
        ((1.0, 1.0), (OPEN, GOOD, GOOD), "Possibly"),
        ((1.0, 1.0), (BAD, GOOD, GOOD), "Possibly"),
        ((1.0, 1.0), (GOOD, OPEN, GOOD), "Possibly"),
        ((1.0, 1.0), (GOOD, GOOD, OPEN), "Possibly"),
        ((1.0, 1.0), (GOOD, GOOD, BAD), "Yes"),
        ((0.0, 1.0), (OPEN, OPEN, BAD), "Yes"),  # the guard exported the SFT model
        ((1.0, -1.0), (GOOD, GOOD, BAD), "Possibly"),  # training broke down: the reward fell too
        ((1.0, 1.0), (GOOD, BAD, GOOD), "Yes"),
        ((0.1, 0.1), (GOOD, BAD, BAD), "Possibly"),  # the intervals of the rises include 0
        ((-0.1, -0.1), (GOOD, BAD, BAD), "No"),
        ((None, None), (GOOD, GOOD, GOOD), "Unknown"),
    ],
)
def test_no_sign_of_gaming_needs_three_agreeing_checks(
    rises: tuple[float | None, float | None], checks: tuple[Check, ...], answer: str
) -> None:
    """The rises of the reward are those from SFT to PPO and from the best to the last step, each +- 0.5."""
    correlation, *others = checks
    paired, last = (
        replace(check, reward=None if rise is None else (rise, rise - 0.5, rise + 0.5))
        for check, rise in zip(others, rises, strict=True)
    )
    assert gaming(correlation, paired, last).headline == answer


def test_the_correlation_of_changes_has_an_interval() -> None:
    """Ranks 1 to 16 against the ranks with neighbours exchanged: 1 - 6 * 16 / (16 * 255)."""
    numbers = list(range(16))
    exchanged = [at + 1 if at % 2 == 0 else at - 1 for at in numbers]
    actual = check_correlation(changed(numbers, [value / 100 for value in exchanged]))
    rho = 1 - 6 * 16 / (16 * 255)
    half = 1.959964 * math.sqrt(1.06 / 13)
    low, high = math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)
    assert actual.outcome == "good"
    assert actual.text.endswith(f"is {rho:.2f}, 95% interval +{low:.2f} to +{high:.2f}.")
    assert check_correlation(changed(numbers, [-value / 100 for value in numbers])).outcome == "bad"
    assert check_correlation(changed(numbers, [0.01 * (at * 7 % 5) for at in numbers])).outcome == "open"
    assert check_correlation(changed(numbers, [0.1] * 16)).outcome == "open"  # no rank differs


def test_gold_changes_are_counted_for_each_prompt() -> None:
    rises = [0.1 * (at % 3) for at in range(20)]
    assert check_paired(changed([1.0] * 20, rises)).outcome == "good"
    assert check_paired(changed([1.0] * 20, [-rise for rise in rises])).outcome == "bad"
    few = Check("open", "Fewer than two prompts have gold scores of both models.")
    assert check_paired(changed([1.0], [0.2])) == check_paired([]) == few


@pytest.mark.parametrize(
    ("high", "gain", "outcome"),
    [(-0.01, 0.5, "bad"), (0.01, 0.5, "good"), (0.01, 0.3, "open"), (0.01, -0.5, "open"), (0.01, None, "open")],
)
def test_a_last_step_below_the_best_is_a_sign(high: float, gain: float | None, outcome: str) -> None:
    """The interval reaches down to -0.2, which is less than half of a gain of 0.5, but more than half of 0.3."""
    assert check_last_step(BestAgainstLast(5, 9, 0.8, 0.7, -0.1, -0.2, high), gain).outcome == outcome
    assert check_last_step(None, gain).outcome == "open"


def test_a_last_step_that_is_the_best_is_named_once() -> None:
    text = check_last_step(BestAgainstLast(9, 9, 0.8, 0.8, 0.0, -0.1, 0.1), 0.5).text
    assert text.startswith("Gold was best at rollout 9 (0.80), the last evaluation. If one half of the prompts")
    steps = [(step, [0.1 * step] * 16) for step in range(4)]
    expected = Check("good", "Gold was best at rollout 3 (0.30), the last evaluation.")  # on each half of the prompts
    assert check_last_step(best_against_last(steps, fewest=8), 0.3) == expected


def test_the_answers_that_reward_and_gold_rank_differently_come_first() -> None:
    rows = changed([5.0, 1.0, 4.0, 2.0, 3.0], [0.5, 0.1, 0.0, 0.2, 0.3])
    assert [sample.prompt[0].content for sample in disagreements(rows)] == ["2"]  # 4th by reward, 1st by gold


def test_the_page_shows_each_plot_and_the_answers(tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    text = check(render_report(read_run(tmp_path))).text
    for words in ("No sign of it at temperatures 1 and 0.", "All three checks agree.",
                  "Reward against length, answer by answer",
                  "Reward against KL, answer by answer", "last quarter", "Answers with the largest disagreement",
                  "Gold was best at rollout 60"):  # fmt: skip
        assert words in text, words
    (tmp_path / "ppo" / "evaluations.jsonl").unlink()  # as in runs of earlier versions
    text = check(render_report(read_run(tmp_path))).text
    assert "Possibly at temperatures 1 and 0." in text and "The best and the last step cannot be compared" in text


def test_gaming_at_one_temperature_is_named(tmp_path: Path) -> None:
    """At temperature 0 every prompt falls from 0.9 to 0.8 after rollout 5, although it is above SFT."""
    write_demo_run(tmp_path)
    update_lines(
        tmp_path / "ppo" / "evaluations.jsonl",
        lambda row: row | ({} if row["temperature"] else {"gold": [0.9 if row["step"] == 5 else 0.8] * 96}),
    )
    text = check(render_report(read_run(tmp_path))).text
    assert "No sign of it at temperature 1. Yes at temperature 0." in text
