"""Rewards for the tasks of reasoning-gym: the task's own program checks the answer.

    pip install '.[tasks]'
    python train.py data=reasoning-gym ppo=grpo ppo.reward_model=false \
        ppo.reward_function=examples/rewards/reasoning_tasks.py:solved

A row contains what `reasoning_gym.create_dataset` generates: question, answer, and metadata with the name of the task.

Some tasks pass the answer to Python's `eval` or to SymPy, which evaluates Python code (reasoning-gym 0.1.25). A model
must not run code, so that such a task gets only answers that are numbers and operators, or none at all.
"""

import re
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn

EVALUATED = {"binary_matrix", "countdown", "puzzle24", "spiral_matrix"}  # their right answers have no letters
REFUSED = {
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "simple_integration",
    "string_insertion",
}
HARMLESS = re.compile(r"(?!.*\*\s*\*)[\d\s+\-*/().,\[\]]{0,1000}", re.ASCII | re.DOTALL)  # no names, no powers


def solved(answer: str, row: dict[str, Any]) -> float:
    """Return 1 for an answer that gets the full score of its task, otherwise 0.

    A sum of parts of the score may round to slightly more than 1, for an answer that is not right.
    """
    return float(score(answer, row) == 1.0)


def score(answer: str, row: dict[str, Any]) -> float:
    """Return the score of the task, from 0 to 1; some tasks give part of it for an answer that is nearly right.

    Raises ValueError for a task whose check would run the answer as code.
    """
    task = row["metadata"]["source_dataset"]
    if task in REFUSED:
        raise ValueError(f"the check of the task {task} runs the answer as Python code: select another task")
    if task in EVALUATED and not HARMLESS.fullmatch(answer):
        return 0.0
    return float(_check(task)(answer.strip(), row))


@cache
def _check(task: str) -> Any:
    """Return the scoring function of a task. Some tasks read a file when they are made."""
    return get_score_answer_fn(task)
