"""The rules of the training guard against numbers computed by hand."""

import math
from functools import partial
from typing import Any

import pytest

from pipeline.evaluation.evaluator import Evaluation
from step3_ppo.guard_rules import (
    Finding,
    against_judge,
    check_evaluation,
    check_rollouts,
    fall,
    fall_at_the_end,
)

Grades = partial(Evaluation, [])  # without answers: scores and gold scores
HEALTHY = {
    "answers": 64.0, "kl": 1.0, "approx_kl": 0.01, "clip_fraction": 0.1, "entropy": 0.8, "response_length": 10.0,
    "length_correlation": 0.2, "eos_rate": 0.9, "explained_variance": 0.3,
}  # fmt: skip


def rows(count: int = 12, first: dict[str, float] | None = None, **last: Any) -> list[dict[str, float]]:
    """Return a first and four last rollouts. `last` has one value for all last rollouts, or a list of their values."""
    made = [{**HEALTHY, **(first or {}), "step": 1.0}]
    for number in range(4):
        of_last = {name: value[number] if isinstance(value, list) else value for name, value in last.items()}
        made.append({**HEALTHY, "step": float(count - 3 + number), **of_last})
    return made


def longer(length: float, correlation: float) -> dict[str, Any]:
    return {"response_length": length, "length_correlation": correlation}


def signs(actual: list[Finding]) -> list[str]:
    return [finding.sign for finding in actual]


def test_a_healthy_run_has_no_findings() -> None:
    assert check_rollouts(rows()) == []
    assert check_rollouts(rows()[:2]) == [] and check_rollouts(rows()[:1]) == []


@pytest.mark.parametrize(
    ("sign", "below", "above"),
    [
        ("clip fraction", {"clip_fraction": [0.1, 0.3, 0.35, 0.39]}, {"clip_fraction": [0.1, 0.3, 0.35, 0.42]}),
        ("update KL", {"approx_kl": [9.0, 0.12, 0.09, 0.08]}, {"approx_kl": [0.0, 0.05, 0.11, 0.12]}),
        ("update KL", {"approx_kl": [0.0, 0.007, 7.95, 0.004]}, {"approx_kl": [0.0, 0.2, 7.95, 0.004]}),
        ("KL", {"kl": 10.0}, {"kl": 10.1}),  # 10 tokens
        ("KL rate", {"kl": [2.0, 3.0, 4.0, 5.0]}, {"kl": [2.0, 3.0, 4.0, 6.1]}),
        ("KL rate", {"kl": [0.1, 1.0, 2.0, 3.0]}, {"kl": [0.1, 1.0, 2.0, 3.2]}),
        ("entropy", {"entropy": 0.041}, {"entropy": 0.039}),  # 0.05 * 0.8
        ("entropy", {"entropy": 2.09}, {"entropy": 2.11}),  # 2 * 0.8 + 0.5
        ("length", longer(16.0, 0.89), longer(16.0, 0.91)),
        ("length", longer(12.0, 0.95), longer(13.0, 0.95)),
        ("finished answers", {"eos_rate": 0.51}, {"eos_rate": 0.49}),
        ("explained variance", {"explained_variance": -0.9}, {"explained_variance": -1.1}),
        ("explained variance", {"explained_variance": [0.1, 0.3, -1e6, 0.2]}, {"explained_variance": [0, 0.3, -2, -3]}),
    ],
)  # fmt: skip
def test_each_rule_has_its_limit(sign: str, below: dict[str, Any], above: dict[str, Any]) -> None:
    assert check_rollouts(rows(**below)) == []
    (finding,) = check_rollouts(rows(**above))
    assert finding.sign == sign and finding.lr_helps == (sign != "length")


def test_a_fall_of_the_entropy_is_no_sign_if_the_rewards_of_a_function_rose() -> None:
    """Standard error: sqrt(0.5^2 / 64 + 0.2^2 / 192) = 0.064; 3.09 errors are 0.198."""
    first = {"score": 0.5, "score_std": 0.5}
    for score, expected in ((0.69, ["entropy"]), (0.70, [])):
        assert signs(check_rollouts(rows(first=first, entropy=0.01, score=score, score_std=0.2))) == expected
    assert signs(check_rollouts(rows(entropy=0.01, score=0.9, score_std=0.2))) == ["entropy"]  # no first score
    assert signs(check_rollouts(rows(first=first, entropy=3.0, score=0.9, score_std=0.2))) == ["entropy"]  # it rose


def test_answers_that_are_truncated_from_the_start() -> None:
    (actual,) = check_rollouts(rows(first={"eos_rate": 0.3}, eos_rate=[1.0, 0.3, 0.4, 0.5]))
    assert actual.sign == "finished answers" and not actual.lr_helps
    assert "only 40% of the answers end within rollout.max_new_tokens (30% in the first rollout)" in actual.sentence


def test_few_answers_and_missing_metrics_give_no_findings() -> None:
    assert check_rollouts(rows(clip_fraction=0.9, answers=21)) == []  # 63 in a window
    assert signs(check_rollouts(rows(clip_fraction=0.9, answers=22))) == ["clip fraction"]
    bare = [{"step": row["step"], "answers": 64.0, "response_length": 10.0, "eos_rate": 0.9} for row in rows()]
    assert check_rollouts(bare) == []
    assert check_rollouts(rows(clip_fraction=math.nan)) == []
    assert check_rollouts(rows(count=9, explained_variance=-2.0)) == []  # the critic has trained for too few steps


def test_a_reward_against_the_judge() -> None:
    """With 103 answers, the limit is -tanh(3.090 * sqrt(1.06 / 100)) = -tanh(0.3181) = -0.3078."""
    gold = [float(i) for i in range(103)]

    def correlated(swapped: int) -> Evaluation:
        """Reverse the first s = `swapped` ranks: 1 - 6 sum d^2 / (n (n^2 - 1)), sum d^2 = (s^3 - s) / 3."""
        return Grades([*gold[:swapped][::-1], *gold[swapped:]], gold)

    def by_hand(swapped: int) -> float:
        return 1 - 2 * (swapped**3 - swapped) / (103 * (103**2 - 1))

    assert by_hand(89) == pytest.approx(-0.2903, abs=1e-4) and against_judge(correlated(89), 1.0) is None
    actual = against_judge(correlated(91), 1.0)
    assert by_hand(91) == pytest.approx(-0.3792, abs=1e-4) and actual is not None
    assert actual.sign == "judge" and not actual.lr_helps
    assert "rank correlation -0.38 over 103 answers" in actual.sentence
    assert against_judge(Grades(gold[:31][::-1], gold[:31]), 1.0) is None  # too few prompts
    assert against_judge(Grades(None, gold), 1.0) is None and against_judge(Grades(gold, None), 1.0) is None


def test_a_gold_score_that_rose_clears_the_reward() -> None:
    """A normal run whose greedy gold score rose by 0.31 had a rank correlation of -0.21 over 256 answers."""
    gold = [float(i) for i in range(103)]
    against = Grades(gold[::-1], gold)
    risen = Grades(None, [value - (1.0 if value % 2 else 0.5) for value in gold])
    unclear = Grades(None, gold[::-1])  # mean change 0
    assert against_judge(against, 0.0, risen) is None and against_judge(against, 0.0, unclear) is not None
    assert check_evaluation({0: {0.0: risen}, 4: {0.0: against}}, best=0) == []
    assert signs(check_evaluation({0: {0.0: unclear}, 4: {0.0: against}}, best=0)) == ["judge"]


def test_a_fall_of_the_gold_score() -> None:
    """64 prompts: 16 fall by 1 and 48 stay. Mean -0.25, deviation sqrt(64/63 * 3/16), half width 3.225 * 0.0546."""
    before = Grades([0.0] * 64, [1.0] * 64)
    now = Grades([0.5] * 64, [0.0] * 16 + [1.0] * 48)
    half = 3.225 * math.sqrt(64 / 63 * 3 / 16) / 8  # t of 63 degrees at 99.9 %
    actual = fall(before, now, 4, 1.0)
    assert actual is not None and actual.sign == "gaming"
    assert f"below that of step 4 by 0.25 (at least {0.25 - half:.2f}" in actual.sentence
    assert "while the mean reward rose by 0.50" in actual.sentence
    lower = fall(before, Grades([-0.5] * 64, now.gold), 0, 1.0)
    assert lower is not None and lower.sign == "gold" and "that of the SFT model" in lower.sentence
    unclear = fall(before, Grades([0.9, -0.5] * 32, now.gold), 4, 1.0)  # the mean reward rises by 0.2 +- 0.28
    assert unclear is not None and unclear.sign == "gold"
    few = Grades([0.5] * 64, [0.0] * 8 + [1.0] * 56)  # mean -0.125, half width 0.1344
    assert fall(before, few, 4, 1.0) is None
    assert fall(Grades([0.0] * 31, [1.0] * 31), Grades([0.0] * 31, [0.0, 0.5] * 15 + [0.0]), 4, 1.0) is None


@pytest.mark.parametrize(("lost", "is_found"), [(24, False), (25, True)])
@pytest.mark.parametrize("judged", [True, False])
def test_a_fall_from_a_later_step_counts_if_it_loses_more_than_half_of_the_gain(
    lost: int, is_found: bool, judged: bool
) -> None:
    """Of 64 prompts, 48 gained 1 until step 4. Half of this gain are 24 prompts."""

    def graded(right: int) -> Evaluation:
        values = [1.0] * right + [0.0] * (64 - right)
        return Grades([0.0] * 64, values) if judged else Grades(values, None)

    initial, best, now = graded(16), graded(64), graded(64 - lost)
    assert (fall(best, now, 4, 1.0, initial) is not None) is is_found
    assert fall(best, now, 0, 1.0, best) is not None  # below the SFT model, each fall counts


@pytest.mark.parametrize(
    ("earlier", "lost", "is_found"),
    [(17, 17, True), (16, 17, False), (17, 16, False), (24, 17, True), (None, 17, False)],
)
@pytest.mark.parametrize("judged", [True, False])
def test_a_second_fall_in_a_row_counts_if_both_lose_more_than_a_third_of_the_gain(
    earlier: int | None, lost: int, is_found: bool, judged: bool
) -> None:
    """Of 64 prompts, 48 gained 1 until step 4. A third of this gain are 16 prompts."""

    def graded(right: int) -> dict[float, Evaluation]:
        values = graded_values(right)
        return {0.0: Grades([0.0] * 64, values) if judged else Grades(values, None)}

    previous = {} if earlier is None else {8: graded(64 - earlier)}
    before, now = {0: graded(16), 4: graded(64)}, {12: graded(64 - lost)}
    assert bool(check_evaluation({**before, **previous, **now}, best=4)) is is_found
    if earlier is not None:  # the best step is compared at each temperature with its own previous grades
        assert check_evaluation({**before, 8: {1.0: previous[8][0.0]}, **now}, best=4) == []


@pytest.mark.parametrize(("lost", "is_found"), [(3, False), (4, True)])
def test_a_small_fall_counts_at_the_last_step_if_it_is_clear(lost: int, is_found: bool) -> None:
    """Of 64 prompts, 3 or 4 lose 1: the mean change is -0.047 or -0.063, the half widths are 0.0532 and 0.0610."""
    history = [(0, graded_values(40)), (4, graded_values(64)), (8, graded_values(64 - lost))]
    actual = fall_at_the_end(history, (0.5, 0.1, 0.9), judged=True)
    assert bool(actual) is is_found
    if actual is not None:
        assert actual.sign == "gaming" and not actual.lr_helps
        assert actual.sentence.startswith(
            "in the mean over the temperatures, the gold score of the last step is below that of step 4 by 0.06"
        )


def test_a_fall_at_the_end_below_a_tenth_of_the_gain_is_not_a_sign() -> None:
    """Every prompt loses 0.04, which no noise explains. The gain of step 4 is 0.5 or 0.3."""
    for first, is_found in ((0.5, False), (0.7, True)):
        history = [(0, [first] * 64), (4, [1.0] * 64), (8, [0.96] * 64)]
        assert bool(fall_at_the_end(history, None, judged=True)) is is_found
    rise, unclear = (0.5, 0.1, 0.9), (0.5, -0.1, 1.1)
    for reward, judged, sign in ((unclear, True, "gold"), (None, True, "gold"), (rise, False, "reward")):
        actual = fall_at_the_end(history, reward, judged=judged)
        assert actual is not None and actual.sign == sign


def graded_values(right: int) -> list[float]:
    return [1.0] * right + [0.0] * (64 - right)


def test_without_a_judge_the_reward_falls() -> None:
    actual = fall(Grades([1.0] * 64, None), Grades([0.0] * 16 + [1.0] * 48, None), 4, 1.0)
    assert actual is not None and actual.sign == "reward"


def test_an_evaluation_is_compared_at_each_temperature_with_each_step() -> None:
    high, low = Grades([0.0] * 64, [1.0] * 64), Grades([1.0] * 64, [0.0] * 32 + [1.0] * 32)
    rises = {0: {1.0: high, 0.0: low}, 4: {1.0: high, 0.0: high}}
    assert check_evaluation(rises, best=0) == []
    falls = {0: {1.0: high, 0.0: high}, 4: {0.0: high}, 8: {1.0: high, 0.0: low}}
    actual = check_evaluation(falls, best=4)
    assert signs(actual) == ["gaming"]
    assert "at temperature 0 is below that of the SFT model by 0.50" in actual[0].sentence
    assert check_evaluation({0: {1.0: low}}, best=None) == []
