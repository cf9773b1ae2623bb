"""A sample of the campaign of inputs."""

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
    cases = {f"{case.part}: {case.name}": case for case in all_cases()}
    results = run_cases([cases[name] for name in SAMPLE])
    assert {f"{case.part}: {case.name}": faults for case, faults, _ in results if faults} == {}


def test_the_table_has_cases_of_every_part_with_names_of_their_own() -> None:
    names = [(case.part, case.name) for case in all_cases()]
    assert len(set(names)) == len(names)
    assert {part for part, _ in names} == {"config", "data", "model", "template", "function", "service", "run"}
