"""A sample of the campaign of inputs, and its own judgement of output."""

import pytest

from tests.campaign.__main__ import main
from tests.campaign.cases import Case, faults_of
from tests.campaign.inputs import all_cases, run_cases

SAMPLE = (
    "config: model.architecture.hiden_size=64",
    "config: engine.deepspeed of []",
    "data: escape sequences in a role",
    "model: NaN in one weight",
    "model: num_hidden_layers=1",
    "template: divides by zero",
    "service: a redirect to another service",
)


def test_bad_inputs_end_with_one_message() -> None:
    cases = {f"{case.part}: {case.name}": case for case in all_cases(seed=1, count=0)}
    results = run_cases([cases[name] for name in SAMPLE])
    assert {f"{case.part}: {case.name}": faults for case, faults, _ in results if faults} == {}


def test_the_table_has_cases_of_every_part_with_names_of_their_own() -> None:
    cases = all_cases(seed=3, count=20)
    names = [(case.part, case.name) for case in cases]
    assert len(set(names)) == len(names) > 300
    parts = {"config", "data", "model", "template", "function", "service", "run", "random"}
    assert {case.part for case in cases} == parts
    assert [case.name for case in all_cases(seed=3, count=20)] == [case.name for case in cases]


@pytest.mark.parametrize(
    ("status", "output", "fault"),
    [
        (2, "error: x=1: write a number\n", None),
        (0, "x=1\n", "exit status 0, not 2"),
        (2, "error: x=1\nerror: x=1 again\n", "2 error messages"),
        (2, "x=1\n", "0 error messages"),
        (2, "error: y\n", "does not say"),
        (2, "Traceback (most recent call last):\nerror: x=1\n", "a traceback"),
        (2, "error: x=1 \x1b[31m\n", "control characters"),
        (2, f"error: x=1 {'x' * 3000}\n", "a message of 30"),
    ],
)
def test_what_counts_as_a_fault(status: int, output: str, fault: str | None) -> None:
    found = faults_of(Case("config", "x=1", (), "x=1"), status, output)
    assert (found == []) if fault is None else (len(found) == 1 and found[0].startswith(fault))


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == main([]) == 2
    assert "usage: python -m tests.campaign kills|faults|inputs" in capsys.readouterr().err
