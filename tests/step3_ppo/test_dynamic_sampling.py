"""Prompts whose answers have equal scores are replaced, by the same prompts on every rank and in resumed runs."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from engine import Generation
from step3_ppo.advantages import RewardShaping
from step3_ppo.dynamic_sampling import new_prompts, replace_uniform, uniform_prompts
from step3_ppo.rollout import Answered, Scores
from tests.step3_ppo.test_stage import ppo_of

PLAIN = RewardShaping(missing_end_penalty=0.5)


def generation(*ids: int, finished: bool = True) -> Generation:
    return Generation(list(ids), [0.0] * len(ids), finished)


def test_penalties_count_for_equal_scores() -> None:
    answers = [generation(1), generation(2), generation(3), generation(4, finished=False)]
    assert uniform_prompts([1.0, 1.0, 1.0, 1.0], answers, PLAIN, samples=2) == [0]
    assert uniform_prompts([1.0, 1.0, 1.0, 1.5], answers, PLAIN, samples=2) == [0, 1]
    assert uniform_prompts([3.0, 4.0, 1.0, 1.0], answers, RewardShaping(2.0), samples=2) == [0]


def test_new_prompts_are_unused_and_depend_on_the_seed() -> None:
    actual = new_prompts(4, {0, 1, 2}, count=10, seed=(1, 5, 1))
    assert len(set(actual)) == 4 and not set(actual) & {0, 1, 2}
    assert actual == new_prompts(4, {0, 1, 2}, count=10, seed=(1, 5, 1))
    others = [new_prompts(4, {0, 1, 2}, count=10, seed=seed) for seed in ((2, 5, 1), (1, 6, 1), (1, 5, 2))]
    assert all(other != actual for other in others)
    assert len(new_prompts(9, {0, 1, 2}, count=10, seed=(1, 5, 1))) == 7


@pytest.mark.parametrize(("rounds", "count"), [(1, 100), (3, 100), (5, 7)])
def test_uniform_prompts_are_replaced_in_place(rounds: int, count: int) -> None:
    """Prompts 0 to 4 and odd prompts have score 1 for both answers. Other scores depend on the answer."""
    calls: list[tuple[list[int], int]] = []

    def sample(prompts: list[int], number: int) -> Answered:
        calls.append((prompts, number))
        answers = [generation(prompt, sample) for prompt in prompts for sample in range(2)]
        return Answered(prompts, answers, score(answers))

    def score(generations: list[Generation]) -> Scores:
        scores = [1.0 if p % 2 or p < 5 else float(g.token_ids[1]) for g in generations for p in g.token_ids[:1]]
        halves = [each / 2 for each in scores]
        rewards = {"brief": halves, "model": scores[:]}
        # A reward function may return its parts in another order at each call.
        return Scores(scores, halves, dict(sorted(rewards.items(), reverse=bool(calls))))

    first = [generation(p, s) for p in (1, 6, 3) for s in range(2)]
    start = Answered([1, 6, 3], first, score(first))
    settings: dict[str, Any] = {"samples": 2, "rounds": rounds, "count": count, "seed": (1, 4)}
    actual = replace_uniform(start, sample, PLAIN, **settings)
    assert actual.prompts[1] == 6 and len(set(actual.prompts)) == 3
    assert [each.token_ids for each in actual.generations] == [[p, s] for p in actual.prompts for s in range(2)]
    assert actual.scores == score(actual.generations)
    assert calls[0][1] == 1 and len(calls[0][0]) == 2 and actual.replaced == sum(len(prompts) for prompts, _ in calls)
    used = [1, 6, 3, *(prompt for prompts, _ in calls for prompt in prompts)]
    assert len(used) == len(set(used)) <= count and len(calls) <= rounds
    again = replace_uniform(start, sample, PLAIN, **settings)
    assert again == actual and start.prompts == [1, 6, 3]
    if rounds == 3:
        assert all(prompt % 2 == 0 and prompt > 4 for prompt in actual.prompts)


def test_prompts_with_different_scores_are_not_replaced() -> None:
    start = Answered([1], [generation(1), generation(2)], Scores([1.0, 2.0], None, {}))
    actual = replace_uniform(
        start, lambda *_: pytest.fail("no prompt is replaced"), PLAIN, samples=2, rounds=3, count=9, seed=(1, 1)
    )
    assert actual.prompts == [1] and actual.replaced == 0 and actual.scores == Scores([1.0, 2.0], None, {})


def test_each_step_and_round_has_samples_of_its_own(run_folder: Path) -> None:
    ppo, stage = ppo_of(run_folder, advantage="rloo", samples=2, resample=2)

    def answers(step: int, number: int) -> list[list[int]]:
        return [each.token_ids for each in ppo._sample(step, stage, [9, 10, 11], number).generations]

    made = {place: answers(*place) for place in [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2**20, 1)]}
    for one, other in combinations(made.values(), 2):
        assert not any(a == b for a, b in zip(one, other, strict=True))
    assert answers(1, 1) == made[1, 1]
