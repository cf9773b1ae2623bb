from pathlib import Path
from typing import Any

import pytest

from pipeline.config.check import validate
from pipeline.config.check_machine import check_paths
from pipeline.config.compose import compose
from pipeline.data.records import Message, Prompt
from pipeline.errors import SharedError, UserError
from pipeline.evaluation.evaluator import Evaluator, compare_models
from pipeline.evaluation.judge import compare_pairs, judged
from pipeline.evaluation.samples import Sample, read_samples, write_samples
from pipeline.evaluation.user_function import PAIR_JUDGE, UserFunction, load_function

PROMPTS = [Prompt((Message("user", f"What is {n} + 1?"),), "demo") for n in range(3)]


def test_gold_scores_need_the_demos_prompts() -> None:
    scores = judged(PROMPTS, ["It is 1.", "2", "nonsense of the worst kind"], None)
    assert scores is not None
    assert scores[0] == 1.0 > scores[1] > scores[2] == 0.0
    assert judged([*PROMPTS, Prompt(PROMPTS[0].messages, "gsm8k")], ["1"] * 4, None) is None
    own_file = [*PROMPTS, Prompt((Message("user", "Translate this sentence."),), "demo")]  # a user's demo.jsonl
    assert judged(own_file, ["1"] * 4, None) is None
    assert judged([], [], None) is None


def pair_judge(file: Path, body: str, *, threads: int = 1) -> UserFunction:
    file.write_text(f"def prefer(first, second, row):\n    {body}\n")
    return load_function(f"{file}:prefer", threads, key=PAIR_JUDGE)


def rows_of(count: int) -> list[Prompt]:
    return [Prompt((Message("user", str(n)),), "mine", {"n": n}) for n in range(count)]


@pytest.mark.parametrize("threads", [1, 4])
def test_each_pair_is_judged_in_both_orders(tmp_path: Path, threads: int) -> None:
    prompts = rows_of(5)
    new, old = ["long answer", "b", "same", "?", "a"], ["c", "long answer", "same", "d", "b"]
    longer = pair_judge(
        tmp_path / "a.py", "return None if first == '?' else float(len(first) > len(second))", threads=threads
    )
    # The last pair: equal lengths, so this judge prefers the second answer in both orders.
    assert compare_pairs(prompts, new, old, longer) == [(1.0, 1.0), (0.0, 0.0), (0.5, 0.5), (None, 1.0), (0.0, 1.0)]
    assert compare_pairs([*prompts[:4], Prompt(prompts[4].messages, "mine")], new, old, longer) is None


@pytest.mark.parametrize(("body", "message"), [
    ("return 2", "returned 2.0, not a number from 0"), ("return 'A'", "returned str, not a number"),
    ("raise ValueError('no')", "raised ValueError: no"), ("return float('nan')", "returned nan"),
])  # fmt: skip
def test_a_pair_judge_that_fails_stops_the_stage(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(SharedError, match=message):
        compare_pairs(rows_of(2), ["a", "b"], ["c", "d"], pair_judge(tmp_path / "a.py", body))


def test_a_pair_judge_takes_two_answers_and_a_row(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def grade(answer, row):\n    return 1\n")
    with pytest.raises(
        UserError, match=r"evaluation\.pair_judge=.*called like def grade\(first: str, second: str, row"
    ):
        load_function(f"{file}:grade", key=PAIR_JUDGE)


def test_a_pair_judge_is_checked_before_any_stage(tmp_path: Path) -> None:
    base = [f"evaluation.pair_judge={tmp_path}/a.py:prefer", f"data.path={tmp_path}/data.jsonl"]
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    config = validate(compose(base))
    with pytest.raises(UserError, match=r"evaluation\.pair_judge=.*there is no file"):
        check_paths(config)
    pair_judge(tmp_path / "a.py", "return None")
    check_paths(config)


def test_final_answers_are_compared_with_those_of_sft(tmp_path: Path) -> None:
    prompts, folder = rows_of(2), tmp_path / "ppo"
    folder.mkdir()
    write_samples(folder / "samples.jsonl", [Sample(p.messages, {"sft": "old"}, temperature=1.0) for p in prompts])

    nothing: Any = None
    evaluator = Evaluator(prompts, nothing, nothing, (1.0, 0.0))
    own = {temperature: evaluator.grade(["newer", "n"]) for temperature in evaluator.temperatures}
    longer = pair_judge(tmp_path / "a.py", "return float(len(first) > len(second))")
    compare_models(evaluator, folder, own, longer)
    results = {
        (s.prompt[0].content, s.temperature): dict(s.preferences) for s in read_samples(folder / "samples.jsonl")
    }
    assert results == {  # at temperature 0, SFT has no answer for a comparison
        ("0", 1.0): {"ppo": (1.0, 1.0)}, ("1", 1.0): {"ppo": (0.0, 0.0)}, ("0", 0.0): {}, ("1", 0.0): {},
    }  # fmt: skip
