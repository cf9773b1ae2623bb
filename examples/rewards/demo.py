"""A reward for the demo's prompts: a brief answer that ends like a sentence, and that is right where a sum was asked.

    python train.py ppo.reward_model=false ppo.reward_function=examples/rewards/demo.py:brief_and_right

What it checks of an answer is less than what the demo's gold scorer does (it knows nothing of manners, animals or
opposites), and it has none of that scorer's code, so that the gold score can still tell whether it is gamed.
"""

import re
from typing import Any

MOST_WORDS = 10
SUMS = (
    (re.compile(r"(\d+) plus (\d+)"), 1),
    (re.compile(r"(\d+) minus (\d+)"), -1),
    (re.compile(r"has (\d+) \w+ and gets (\d+) more"), 1),
    (re.compile(r"has (\d+) \w+ and gives away (\d+)"), -1),
)


def brief_and_right(answer: str, row: dict[str, Any]) -> float:
    """0.5 for one to ten words that end with a full stop or its like; 1 if they are not wrong about a sum besides."""
    words = answer.split()
    if not 1 <= len(words) <= MOST_WORDS or answer[-1] not in ".!?":
        return 0.0
    result = sum_asked(row["prompt"][-1]["content"])
    return 1.0 if result is None or re.findall(r"\d+", answer)[-1:] == [str(result)] else 0.5


def sum_asked(question: str) -> int | None:
    """The result of the sum that a question asks for; None where it asks for none."""
    for pattern, sign in SUMS:
        found = pattern.search(question)
        if found:
            return int(found[1]) + sign * int(found[2])
    return None
