"""The everyday inputs: the gold scorer can judge each of them, and right answers are counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import everyday_inputs
from pipeline.chat import folder, participant
from pipeline.demo.truth import read_question


@pytest.mark.parametrize("form", everyday_inputs.FORMS)
def test_the_gold_scorer_reads_each_input(form: str) -> None:
    change = everyday_inputs.FORMS[form]
    assert len(set(everyday_inputs.INPUTS)) == 36
    assert [text for text in everyday_inputs.INPUTS if read_question(change(text)) is None] == []


def test_right_answers_are_counted_by_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model knows one sum, greets whoever writes in small letters, and forgets each conversation."""

    class Model:
        turns = 0

        def reset(self) -> None:
            self.turns = 0

        def answer(self, system: str, text: str, *_: Any) -> Iterator[str]:
            self.turns += 1
            assert self.turns == 1
            if "2 + 3" in text:
                yield from ("It ", "is 5.")
            else:
                yield "Hello, nice to meet you." if text == "hello" else "I do not know."

    monkeypatch.setattr(folder, "find", lambda path: path)
    monkeypatch.setattr(participant, "load", lambda path: Model())
    actual = everyday_inputs.right_answers("seed-1", "ppo")
    assert actual == {"as_written": 1, "small_letters": 2, "capital_letters": 1}
