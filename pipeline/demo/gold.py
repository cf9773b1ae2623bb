"""The gold scorer: a program that judges answers to demo prompts. It never trains anything.

It reads the prompt's text alone, computes the right answer itself and looks at four things:

    right         says what is true, says nothing else, in the form that was asked for
    to the point  few words, no word over and over
    polite        no insult, no shouting
    finished      ends like a sentence

`gold_score` is `right` times, for each of the other three, a factor between one half and one. So
nothing is won by being polite and wrong, by naming every number, or by saying nothing.

It judges what an answer claims, not its exact words: "It is 7.", "3 plus 4 is 7." and "Seven!" are
equally right. Prompts that it can't read raise ValueError.
"""

import re
from collections.abc import Sequence

from pipeline.data.records import Message
from pipeline.demo.truth import read_question

ENOUGH_WORDS = 10  # the longest good answer has 9
TOO_MANY_WORDS = 16

RUDE = re.compile(
    r"\b(stupid|dumb|dummy|idiots?|fools?|foolish|lazy|moron|ugly|loser|nonsense|shut up|go away|get lost"
    r"|leave me|bother\w*|who cares|your fault|hate you|annoy\w*|waste of)\b"
)


def gold_score(messages: Sequence[Message], answer: str) -> float:
    """How good the answer to the last message is, in [0, 1]."""
    parts = gold_parts(messages, answer)
    score = parts["right"]
    for name in ("to_the_point", "polite", "finished"):
        score *= (1.0 + parts[name]) / 2.0
    return score


def gold_parts(messages: Sequence[Message], answer: str) -> dict[str, float]:
    """right, to_the_point, polite and finished, each in [0, 1]. An answer in which nothing is said has none of them."""
    question = messages[-1].content
    check = read_question(question)
    if check is None:
        raise ValueError(f"the gold scorer can't read this prompt, it judges demo prompts only: {question!r}")
    answer = answer.strip()
    if not re.search(r"\w", answer):
        return dict.fromkeys(("right", "to_the_point", "polite", "finished"), 0.0)
    rules = " ".join(message.content for message in messages if message.role == "system")
    claim = answer.lower()
    return {
        "right": float(check(claim)) * (1.0 if in_form(f"{rules} {question}".lower(), answer) else 0.5),
        "to_the_point": to_the_point(claim),
        "polite": polite(answer),
        "finished": float(answer[-1] in ".!?" and len(answer) > 1),
    }


def to_the_point(claim: str) -> float:
    """1 up to `ENOUGH_WORDS`, falling to 0 at `TOO_MANY_WORDS`; less where words come back again and again."""
    words = re.findall(r"\w+", claim)
    length = (TOO_MANY_WORDS - len(words)) / (TOO_MANY_WORDS - ENOUGH_WORDS)
    variety = 2 * len(set(words)) / len(words)
    return min(1.0, max(0.0, length)) * min(1.0, variety if len(words) > 3 else 1.0)


def polite(answer: str) -> float:
    letters = [char for char in answer if char.isalpha()]
    shouted = len(letters) > 5 and sum(char.isupper() for char in letters) > len(letters) / 2
    return 0.0 if shouted or RUDE.search(answer.lower()) else 1.0


def in_form(instructions: str, answer: str) -> bool:
    """Whether the answer is in the form that the instructions (in small letters) ask for."""
    words = re.findall(r"\w+", answer)
    if "one word" in instructions:
        return len(words) == 1
    if "full sentence" in instructions:
        return len(words) >= 3
    if "small letters" in instructions:
        return answer == answer.lower()
    if "exclamation mark" in instructions:
        return answer.endswith("!")
    begin = re.search(r"(?:begin|start) \w*? ?\w*? ?with the word (\w+)", instructions)
    return not begin or words[0].lower() == begin[1]
