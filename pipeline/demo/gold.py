"""The gold scorer: a program that evaluates answers to demo prompts. It is never used for training.

It reads the text of the prompt, computes the right answer and measures four properties:

    right         the claim is true, and the answer has the requested form
    to the point  the answer has few words, and does not repeat words again and again
    polite        the answer has no insult and is not in capital letters
    finished      the answer ends with the punctuation of a sentence

`gold_score` is `right` times one factor between 1/2 and 1 for each of the other properties. An answer that is polite
and wrong, that names every number, or that has no content therefore scores 0.

The scorer evaluates the claim of an answer, not its exact words: "It is 7.", "3 plus 4 is 7." and "Seven!" are equally
right. Prompts that it cannot parse raise ValueError.
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
    """Return the quality of the answer to the last message, in [0, 1].

    Raises ValueError if that message is not a demo prompt.
    """
    scores = gold_parts(messages, answer)
    score = scores["right"]
    for name in ("to_the_point", "polite", "finished"):
        score *= (1.0 + scores[name]) / 2.0
    return score


def gold_parts(messages: Sequence[Message], answer: str) -> dict[str, float]:
    """Return the scores "right", "to_the_point", "polite" and "finished", each in [0, 1].

    A true claim in the wrong form has 0.5 for "right". An answer without letters and digits has 0 for all four. Raises
    ValueError if the prompt is not a demo prompt.
    """
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
    """Return 1 for up to `ENOUGH_WORDS` words, falling linearly to 0 at `TOO_MANY_WORDS`.

    The score is lower if fewer than half of more than three words are different.
    """
    words = re.findall(r"\w+", claim)
    length = (TOO_MANY_WORDS - len(words)) / (TOO_MANY_WORDS - ENOUGH_WORDS)
    variety = 2 * len(set(words)) / len(words)
    return min(1.0, max(0.0, length)) * min(1.0, variety if len(words) > 3 else 1.0)


def polite(answer: str) -> float:
    """Return 0 for an answer with rude words or mostly capital letters, else 1."""
    letters = [char for char in answer if char.isalpha()]
    shouted = len(letters) > 5 and sum(char.isupper() for char in letters) > len(letters) / 2
    return 0.0 if shouted or RUDE.search(answer.lower()) else 1.0


def in_form(instructions: str, answer: str) -> bool:
    """Return whether the answer has the form that the instructions (in lower case) request."""
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
