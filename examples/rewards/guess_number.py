"""A conversation of several turns: the policy guesses a number from 0 to 9, and the function says "higher" or "lower".

python train.py ppo=grpo ppo.reward_model=false ppo.reward_function=examples/rewards/guess_number.py:guess
"""

import re
import zlib
from collections.abc import Generator
from typing import Any

GUESSES = 4


def guess(answer: str | None, row: dict[str, Any]) -> Generator[str, str | None, float]:
    """1 for the number at the first guess, 0.25 less for each guess more; 0 without the number or without a guess."""
    secret = zlib.crc32(repr(sorted(row.items())).encode()) % 10  # the same in every run
    for number in range(GUESSES):
        found = re.search(r"\d+", answer or "")
        if found is None:
            return 0.0
        if int(found[0]) == secret:
            return 1.0 - number / GUESSES
        answer = yield "Higher." if int(found[0]) < secret else "Lower."
        if answer is None:  # no tokens are left for another answer
            return 0.0
    return 0.0
