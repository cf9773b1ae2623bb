from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine import Sampling
from pipeline.data.records import Message, Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import (
    Evaluation,
    Evaluator,
    answer_again,
    answers_of,
    compare_models,
    write_grades,
    write_table,
)
from pipeline.evaluation.samples import GRADES, SAMPLES, read_grades, read_samples

PROMPTS = [Prompt((Message("user", f"What is {n} + 1?"),), "demo") for n in range(3)]
SAMPLING = Sampling(max_new_tokens=4)


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]


class EchoEngine:
    """An engine that answers with the prompt's last id and its stream, the longest prompt first."""

    def __init__(self) -> None:
        self.flip = self
        self.kept: list[bool] = []

    @contextmanager
    def generating(self, *, keep: bool) -> Iterator["EchoEngine"]:
        self.kept.append(keep)
        yield self

    def assign(self, lengths: Sequence[int]) -> list[int]:
        return sorted(range(len(lengths)), key=lambda place: -lengths[place])

    def generate(self, prompts: list[list[int]], _: Sampling, streams: list[int], text: Any) -> list[Answer]:
        assert text([1, 2]) == "1 2\n"  # the text in which stop strings are searched has its white space
        return [Answer([ids[-1], stream]) for ids, stream in zip(prompts, streams, strict=True)]


class NumberTokenizer:
    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        number = int(messages[-1].content.split()[2])
        return [number] * (number + 1)

    def decode_unstripped(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) + "\n"

    decode = ChatTokenizer.decode


@pytest.mark.parametrize("keep", [False, True])
def test_answers_are_in_the_order_of_the_prompts_with_the_index_as_stream(keep: bool) -> None:
    engine: Any = EchoEngine()
    tokenizer: Any = NumberTokenizer()
    assert answers_of(engine, tokenizer, PROMPTS, [SAMPLING] * 2, keep=keep) == [["0 0", "1 1", "2 2"]] * 2
    stopping = replace(SAMPLING, stop=(" 1",))
    assert answers_of(engine, tokenizer, PROMPTS, [stopping], keep=keep) == [["0 0", "1", "2 2"]]
    assert answers_of(engine, tokenizer, [], [SAMPLING], keep=keep) == [[]]
    assert engine.kept == [keep] * 3


def test_every_evaluation_writes_the_grades_of_each_answer(tmp_path: Path) -> None:
    for step in (0, 5):
        sampled, greedy = (
            Evaluation(["a", "b"], [0.5, -1.0], [1.0, 0.25 + step]),
            Evaluation(["a", "b"], None, [0.0, 1.0]),
        )
        write_grades(tmp_path, step, {1.0: sampled, 0.0: greedy})
    actual = [(one.step, one.temperature, one.scores, one.gold) for one in read_grades(tmp_path / GRADES)]
    assert actual == [
        (0, 1.0, (0.5, -1.0), (1.0, 0.25)), (0, 0.0, (), (0.0, 1.0)),
        (5, 1.0, (0.5, -1.0), (1.0, 5.25)), (5, 0.0, (), (0.0, 1.0)),
    ]  # fmt: skip


def test_equal_answers_have_equal_grades(tmp_path: Path) -> None:
    """The second call of the scorer rounds differently, and a judge may differ from call to call."""
    (tmp_path / "ppo").mkdir()
    earlier = {
        "sft": {0.0: Evaluation(["a", "b", "c"], None, None)},
        "best_of": {0.0: Evaluation(["x", "b", "c"], None, None)},
    }
    write_table(PROMPTS, earlier, tmp_path / "ppo")
    calls: list[float] = []

    def score(answers: Sequence[str]) -> tuple[list[float], list[float]]:
        calls.append(len(calls) / 1e6)
        return [1.0 + calls[-1]] * 3, [2.0 + calls[-1]] * 3

    own = {0.0: Evaluation(["a", "new", "x"], [5.0, 6.0, 7.0], None, [8.0, 9.0, 10.0])}
    compare_models(replace(evaluator_of("b"), score=score), tmp_path / "ppo", own)
    rows = read_samples(tmp_path / "ppo" / SAMPLES)
    assert [row.scores for row in rows] == [
        {"sft": 5.0, "best_of": 1.000001, "ppo": 5.0},
        {"sft": 1.0, "best_of": 1.0, "ppo": 6.0},
        {"sft": 1.0, "best_of": 1.0, "ppo": 7.0},
    ]
    assert [row.function["sft"] for row in rows] == [8.0, 2.0, 2.0]


def evaluator_of(answer: str, prompts: int = 3) -> Evaluator:
    """Return an evaluator of any engine, which has the same answer to each prompt."""

    def answers(*_: Any, **__: Any) -> list[list[str]]:
        return [[answer] * prompts]

    tokenizer: Any = NumberTokenizer()
    return Evaluator(PROMPTS[:prompts], tokenizer, SAMPLING, (0.0,), answer=answers)


def test_a_resumed_stage_answers_again_if_answers_of_its_start_are_missing(tmp_path: Path) -> None:
    engine: Any = EchoEngine()

    def answers(evaluator: Evaluator) -> list[str]:
        answer_again(evaluator, tmp_path, engine, "sft")
        return [sample.answers["sft"] for sample in read_samples(tmp_path / SAMPLES)]

    assert answers(evaluator_of("first")) == []  # the first start answers before its first step
    write_table(PROMPTS[:2], {"sft": {0.0: Evaluation(["old"] * 2, None, None)}}, tmp_path)
    assert answers(evaluator_of("new", prompts=2)) == ["old"] * 2
    assert answers(evaluator_of("new")) == ["new"] * 3
    (tmp_path / SAMPLES).write_text("")  # as the launcher does
    assert answers(evaluator_of("newer")) == ["newer"] * 3


@pytest.mark.parametrize(("longest", "models"), [(12, ["base", "sft", "dpo"]), (24, ["sft", "dpo"])])
def test_the_base_model_is_compared_if_it_sampled_with_the_same_settings(
    longest: int, models: list[str], tmp_path: Path
) -> None:
    for stage, name, tokens in (("sft", "base", 12), ("dpo", "sft", longest)):
        (tmp_path / stage).mkdir()
        write_table(PROMPTS, {name: {0.0: Evaluation(["a"] * 3, None, None)}}, tmp_path / stage)
        settings = f"rollout: {{max_new_tokens: {tokens}, temperature: {tokens}, batch_size: {tokens}}}"
        (tmp_path / stage / "config.yaml").write_text(settings)
    own = {0.0: Evaluation(["b"] * 3, None, None)}
    assert list(compare_models(evaluator_of("b"), tmp_path / "dpo", own)) == models
