"""A reward for grade-school math (data=gsm8k): the number after #### has to be that of the worked solution.

python train.py data=gsm8k ppo=grpo ppo.reward_model=false ppo.reward_function=examples/rewards/gsm8k.py:exact_match
"""

import re
from typing import Any

FINAL = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def exact_match(answer: str, row: dict[str, Any]) -> float:
    """1 where the answer's last final number is the right one, else 0. 1,000, 1000 and 1000.00 are the same."""
    said, right = final_number(answer), final_number(row["answer"])
    return float(said is not None and said == right)


def final_number(text: str) -> float | None:
    """The number behind the last ####, None where there is none."""
    found = FINAL.findall(text)
    return float(found[-1].replace(",", "")) if found else None
