from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine import Sampling
from pipeline.data.records import Message, Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import Evaluation, answers_of, write_grades
from pipeline.evaluation.samples import GRADES, read_grades

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
