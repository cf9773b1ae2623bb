"""Prompts are shared out by the work they will probably make."""

import random

from engine.generation.balance import PROMPT_TOKEN, shares


def test_every_prompt_is_answered_once_and_loads_are_even() -> None:
    lengths = [random.Random(1).randint(1, 500) for _ in range(61)]
    for ranks in (1, 2, 3, 8):
        found = shares(lengths, ranks, expected=40)
        assert sorted(place for places in found for place in places) == list(range(61))
        assert all(places == sorted(places) for places in found)
        loads = [sum(PROMPT_TOKEN * lengths[i] + 40 for i in places) for places in found]
        assert max(loads) - min(loads) <= PROMPT_TOKEN * 500 + 40


def test_long_prompts_are_spread() -> None:
    """Every other one is long: dealt out in turn, one rank would get them all."""
    found = shares([400, 10] * 4, 2, expected=40)
    assert [sum(place % 2 == 0 for place in places) for places in found] == [2, 2]


def test_fewer_prompts_than_ranks() -> None:
    assert sorted(map(len, shares([3, 4], 3, expected=1))) == [0, 1, 1]
