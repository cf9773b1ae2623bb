"""A conversation with a tool: the policy calls a calculator, reads the result and answers.

python train.py data.path=FILE ppo=grpo ppo.reward_model=false \\
    ppo.reward_function=examples/rewards/calculator.py:calculate

Each row of the file has the columns prompt, answer and tools. Calls have the form of the Hermes and Qwen models, which
is also that of zerochat's own templates: <tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import Any

MOST_TURNS = 4
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}
Results = list[dict[str, str]]


def calculate(answer: str | None, row: dict[str, Any]) -> Generator[Results, str | None, float]:
    """1 for the right number in an answer without calls, otherwise 0."""
    for _ in range(MOST_TURNS):
        if answer is None:  # no tokens are left for another answer
            return 0.0
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", answer, re.DOTALL)
        if not calls:
            return float(str(row["answer"]) in re.findall(r"-?\d+", answer))
        answer = yield [{"role": "tool", "content": _result(call)} for call in calls]
    return 0.0


def _result(call: str) -> str:
    """Return the result of a call, or what is wrong with it, so that the policy can correct it."""
    try:
        function = json.loads(call)
        return f"{OPERATIONS[function['name']](**function['arguments']):g}"
    except (ValueError, TypeError, KeyError, OverflowError) as problem:
        return f"error: {type(problem).__name__}: {problem}"
