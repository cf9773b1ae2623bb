"""The made data: the same from the same seed, split by question, mixed in quality as it says it is."""

import json
import re
from collections import Counter
from hashlib import sha256

import pytest

from pipeline.data.records import Message
from pipeline.demo import rows_of
from pipeline.demo.gold import gold_parts, gold_score
from pipeline.demo.truth import read_question

KINDS = ("conversations", "preferences", "prompts")


def demo_rows(examples: int, seed: int = 0) -> dict[str, list[dict]]:
    """Return all rows by kind."""
    return {kind: rows_of(kind, examples, seed) for made in KINDS for kind in (made, f"held_out_{made}")}


ROWS = demo_rows(2000, seed=7)


def messages_of(row: dict) -> list[Message]:
    return [Message(**message) for message in row.get("prompt") or row["messages"][:-1]]


def questions(row: dict) -> list[str]:
    return [message["content"] for message in row.get("prompt") or row["messages"] if message["role"] == "user"]


def test_the_rows_are_those_that_the_published_figures_come_from():
    """The digest is of 2026-11-27, for seed 0. Rows that change on purpose make the figures in README and docs old."""
    text = json.dumps(demo_rows(200))
    assert sha256(text.encode()).hexdigest() == "c3c54900840478a4557a03a7c92f9e82ec0038dd8815f86a1463a7d161bf8158"
    assert demo_rows(60, seed=4) != demo_rows(60)


def test_no_held_out_question_is_in_training_rows():
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


def numbers_and_sign(text: str) -> tuple[str, ...] | None:
    """Return what a sum is about, without its wording; None if the text is not a sum."""
    found = re.search(r"(\d+) (plus|minus|\+|-) (\d+)", text.lower())
    return found and (found[1], {"plus": "+", "minus": "-"}.get(found[2], found[2]), found[3])


def test_no_held_out_sum_is_a_rewording_of_a_training_sum():
    """ "What is 3 + 4?" is held out together with "hi! how much is 3 plus 4"."""
    sums = {
        side: {numbers_and_sign(text) for kind in KINDS for row in ROWS[f"{side}{kind}"] for text in last(row)} - {None}
        for side in ("", "held_out_")
    }
    assert len(sums[""]) > 40 and len(sums["held_out_"]) > 3
    assert not sums[""] & sums["held_out_"]


def last(row: dict) -> list[str]:
    return questions(row)[-1:]


def test_the_most_likely_answer_to_a_sum_is_rude_and_preferences_know_better():
    """Greedy decoding of an imitation of these answers is rude, so that RLHF has something to improve."""
    sums = [row for row in ROWS["conversations"] if numbers_and_sign(questions(row)[-1]) and len(row["messages"]) == 2]
    politeness = [gold_parts(messages_of(row), row["messages"][-1]["content"])["polite"] for row in sums]
    assert 0.15 < sum(politeness) / len(politeness) < 0.35
    openings = Counter(row["messages"][-1]["content"].split()[0] for row in sums)
    assert openings.most_common(1)[0][0] == "What" and openings["What"] > 0.4 * len(sums)
    pairs = [row for row in ROWS["preferences"] if numbers_and_sign(questions(row)[-1])]
    chosen, rejected = (
        sum(gold_parts(messages_of(row), row[side])["polite"] for row in pairs) / len(pairs)
        for side in ("chosen", "rejected")
    )
    assert chosen > rejected + 0.3


def test_the_gold_scorer_reads_every_prompt():
    for kind in KINDS:
        held_out = [messages_of(row)[-1].content for row in ROWS[f"held_out_{kind}"]]
        texts = [messages_of(row)[-1].content for row in ROWS[kind]]
        assert all(read_question(text) is not None for text in texts + held_out)
        assert len(held_out) == len({*held_out})


def test_sft_answers_have_mixed_quality():
    """Some are good; each of the four things the gold scorer looks at is amiss in some."""
    parts = [gold_parts(messages_of(row), row["messages"][-1]["content"]) for row in ROWS["conversations"]]
    assert 0.10 < sum(min(part.values()) == 1 for part in parts) / len(parts) < 0.60
    for name in ("right", "to_the_point", "polite", "finished"):
        assert 0.05 < sum(part[name] < 1 for part in parts) / len(parts) < 0.60


@pytest.mark.parametrize(("split", "share"), [("preferences", 0.05), ("held_out_preferences", 0.0)])
def test_the_gold_scorer_agrees_with_preferences_except_noise(split, share):
    """Ties count as agreement: both answers may be worth nothing, where one is wrong and the other wrong and rude."""
    against = [
        gold_score(messages_of(row), row["chosen"]) < gold_score(messages_of(row), row["rejected"])
        for row in ROWS[split]
    ]
    assert sum(against) / len(against) == pytest.approx(share, abs=0.015)
    assert all(row["chosen"] != row["rejected"] for row in ROWS[split])
