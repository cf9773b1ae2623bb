r"""A reward for answers that are numbers or formulas, checked by math-verify (Kydlíček, 2025).

    pip install '.[math]'
    python train.py data.path=gsm8k.jsonl ppo=grpo ppo.reward_model=false \
        ppo.reward_function=examples/rewards/math_answers.py:correct

The reference is the column answer, solution, completion, output or response of the row, the first that is present. The
final answer of a text is the first line after the last #### (GSM8K), otherwise the last formula or number that
math-verify finds: \boxed{...}, $...$, or plain text. 1,000 and 1000.00, 1/2 and \frac{1}{2}, $12 and 12 dollars are
equal.
"""

import re
import threading
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

REFERENCES = ("answer", "solution", "completion", "output", "response")
SECONDS = 5  # the time limit of parsing, and of the comparison; a signal ends them
LONGEST = 2000  # characters of the end of an answer that are searched
MARK = "####"
MIXED = re.compile(r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?![\d/])")  # 2 1/2, which math-verify reads as a product


def correct(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the final answer equals that of the reference, otherwise 0.

    An answer without a number or formula, and one that exceeds the time limit, gets 0. If the reference has no number
    or formula, the two texts have to be equal. Raises ValueError for a row without a reference, and in a thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("the time limit needs the main thread: set ppo.reward_threads=1 (evaluation.judge_threads=1)")
    column = next((name for name in REFERENCES if row.get(name) is not None), None)
    if column is None:
        raise ValueError(f"the row has none of the columns {', '.join(REFERENCES)}; rename the one with the reference")
    reference, text = final_text(str(row[column])), final_text(answer)
    try:
        expected = _parsed_reference(reference)
        if not expected:
            return float(text.casefold() == reference.casefold())
        return float(verify(expected, _parsed(text), timeout_seconds=SECONDS))
    except Exception:  # sympy raises errors of many kinds for formulas that make no sense, RecursionError for deep ones
        return 0.0


def final_text(text: str) -> str:
    """Return the part of a text that contains its final answer."""
    _, mark, after = text.rpartition(MARK)
    if mark:
        text = next(iter(after.strip().splitlines()), "")
    return MIXED.sub(r"(\1+\2/\3)", text[-LONGEST:].strip())


def _parsed(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=SECONDS))


@lru_cache(maxsize=4096)
def _parsed_reference(text: str) -> list[Any]:
    return _parsed(text)
