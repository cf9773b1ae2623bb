"""The everyday inputs: the gold scorer can judge each of them, and right answers are counted."""

import pytest

from benchmarks import everyday_inputs
from pipeline.demo.truth import read_question


@pytest.mark.parametrize("form", everyday_inputs.FORMS)
def test_the_gold_scorer_reads_each_input(form: str) -> None:
    change = everyday_inputs.FORMS[form]
    assert len(set(everyday_inputs.INPUTS)) == 36
    assert [text for text in everyday_inputs.INPUTS if read_question(change(text)) is None] == []
