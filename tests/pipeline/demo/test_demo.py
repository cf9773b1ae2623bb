"""The made data: the same from the same seed, split by question, mixed in quality as it says it is."""

import json
from collections import Counter
from hashlib import sha256

import pytest

from pipeline.data.records import Message
from pipeline.demo import demo_rows
from pipeline.demo.gold import gold_parts, gold_score
from pipeline.demo.truth import read_question

ROWS = demo_rows(2000, seed=7)
KINDS = ("conversations", "preferences", "prompts")


def messages_of(row: dict) -> list[Message]:
    return [Message(**message) for message in row.get("prompt") or row["messages"][:-1]]


def questions(row: dict) -> list[str]:
    return [message["content"] for message in row.get("prompt") or row["messages"] if message["role"] == "user"]


def test_sizes_are_as_asked():
    assert {kind: len(ROWS[kind]) for kind in KINDS} == {"conversations": 2000, "preferences": 2000, "prompts": 1000}
    assert [len(ROWS[f"held_out_{kind}"]) for kind in KINDS] == [100, 100, 50]


def test_same_seed_same_rows_and_another_seed_others():
    assert demo_rows(60, seed=3) == demo_rows(60, seed=3)
    assert demo_rows(60, seed=3) != demo_rows(60, seed=4)


def test_the_rows_are_those_that_the_published_figures_come_from():
    """The digest is of 2026-11-21. Rows that change on purpose make the figures in README and docs old."""
    text = json.dumps(demo_rows(200))
    assert sha256(text.encode()).hexdigest() == "d06c5ba628bbe07d8c6ce192d22a559b8a1399950edc15de62971b02f1699169"


def test_no_held_out_question_stands_in_training_rows_of_any_kind_or_seed():
    held_out = {questions(row)[-1] for kind in KINDS for row in ROWS[f"held_out_{kind}"]}
    seen = {
        text
        for rows in (ROWS, demo_rows(2000, seed=8))
        for kind in KINDS
        for row in rows[kind]
        for text in questions(row)
    }
    assert len(held_out) > 150
    assert not held_out & seen


def test_held_out_questions_differ_from_each_other():
    for kind in KINDS:
        last = [questions(row)[-1] for row in ROWS[f"held_out_{kind}"]]
        assert len(set(last)) == len(last)


def test_conversations_have_one_to_three_turns_and_end_with_the_assistant():
    turns = Counter(len(questions(row)) for row in ROWS["conversations"])
    assert set(turns) == {1, 2, 3} and turns[1] > turns[2] > turns[3] > 20
    for row in ROWS["conversations"]:
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    systems = sum(row["messages"][0]["role"] == "system" for row in ROWS["conversations"])
    assert 0.05 < systems / 2000 < 0.15


def test_the_gold_scorer_reads_every_prompt():
    for kind in KINDS:
        questions_of_kind = [messages_of(row)[-1].content for row in ROWS[kind] + ROWS[f"held_out_{kind}"]]
        assert all(read_question(question) is not None for question in questions_of_kind)


def test_answers_to_imitate_are_of_mixed_quality():
    """Some are good; each of the four things the gold scorer looks at is amiss in some."""
    parts = [gold_parts(messages_of(row), row["messages"][-1]["content"]) for row in ROWS["conversations"]]
    assert 0.10 < sum(min(part.values()) == 1 for part in parts) / len(parts) < 0.60
    for name in ("right", "to_the_point", "polite", "finished"):
        assert 0.05 < sum(part[name] < 1 for part in parts) / len(parts) < 0.60


@pytest.mark.parametrize(("split", "share"), [("preferences", 0.05), ("held_out_preferences", 0.0)])
def test_the_gold_scorer_agrees_with_preferences_but_for_the_noise(split, share):
    """Ties count as agreement: both answers may be worth nothing, where one is wrong and the other wrong and rude."""
    against = [
        gold_score(messages_of(row), row["chosen"]) < gold_score(messages_of(row), row["rejected"])
        for row in ROWS[split]
    ]
    assert sum(against) / len(against) == pytest.approx(share, abs=0.015)


def test_pairs_differ():
    assert all(row["chosen"] != row["rejected"] for row in ROWS["preferences"])
