"""The reward functions of examples/rewards, called as PPO calls them."""

import ast
from pathlib import Path

import pytest

from pipeline.data.demo import demo_rows
from pipeline.data.files import find, read_table
from pipeline.reward_function import load_function

REWARDS = Path(__file__).resolve().parents[2] / "examples" / "rewards"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("5 + 7 = 12\n#### 12", 1), ("#### 1,200", 0), ("It is 12.", 0), ("", 0), ("####", 0),
        ("#### 13 #### 12.00", 1), ("#### $12", 1), ("#### 12 #### 13", 0), ("#### -12", 0), ("#### 12abc", 1),
        ("#### ,", 0), ("#### twelve", 0),
    ],
)  # fmt: skip
def test_the_number_behind_the_mark_has_to_be_right(answer: str, score: int) -> None:
    function = load_function(f"{REWARDS}/gsm8k.py:exact_match")
    assert function.score(answer, {"question": "How much?", "answer": "5 + 7 = <<5+7=12>>12\n#### 12"}) == score


def test_every_worked_solution_is_right_by_its_own_number() -> None:
    folder = find("../shared/data/gsm8k")
    if folder is None:
        pytest.skip("no shared/data/gsm8k beside this checkout")
    function = load_function(f"{REWARDS}/gsm8k.py:exact_match")
    for file in ("train.jsonl", "test.jsonl"):
        assert all(function.score(row["answer"], row) == 1.0 for row in read_table(folder / file).rows)


@pytest.mark.parametrize(
    ("question", "answer", "score"),
    [
        ("What is 3 plus 4?", "The answer is 7.", 1), ("What is 3 plus 4?", "3 plus 4 is 7.", 1),
        ("What is 3 plus 4?", "The answer is 8.", 0.5), ("Tell me 9 minus 4.", "It is 5!", 1),
        ("Tom has 5 apples and gives away 2. How many are there now?", "There are 3 now.", 1),
        ("Tom has 5 apples and gets 2 more. How many are there now?", "There are 3 now.", 0.5),
        ("What is the opposite of hot?", "It is warm.", 1), ("What is the opposite of hot?", "It is cold", 0),
        ("What is the opposite of hot?", "", 0), ("What is the opposite of hot?", "a b c d e f g h i j k.", 0),
    ],
)  # fmt: skip
def test_brief_and_right(question: str, answer: str, score: float) -> None:
    function = load_function(f"{REWARDS}/demo.py:brief_and_right")
    messages = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "It is 2."}]
    row = {"prompt": [*messages, {"role": "user", "content": question}]}
    assert function.score(answer, row) == score


def test_it_knows_the_demos_prompts_and_nothing_of_the_gold_scorer() -> None:
    function = load_function(f"{REWARDS}/demo.py:brief_and_right")
    scores = [function.score("The answer is 7.", row) for row in demo_rows(1000)["prompts"]]
    assert 0.15 < scores.count(0.5) / len(scores) < 0.35  # the sums, but for those that make seven
    tree = ast.parse((REWARDS / "demo.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert names == {"re", "typing"}
