"""The table of stages against all places that must know a stage. A failure names what a new stage is missing."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from pipeline.config.schema import DataConfig, RunConfig, SourceConfig
from pipeline.config.stage_sections import StageSection
from pipeline.config.stages import ANSWERING, METHODS, STAGES
from pipeline.report.report import write_report


def test_each_stage_has_a_package_and_a_section() -> None:
    for name, stage in STAGES.items():
        assert find_spec(f"{stage.package}.__main__") and find_spec(f"{stage.package}.train"), name
        section = RunConfig.model_fields[name].annotation
        assert isinstance(section, type) and issubclass(section, StageSection), name


def test_the_schema_has_all_stages_and_methods() -> None:
    assert set(get_args(RunConfig.model_fields["stage"].annotation)) == {"all", "plan", *STAGES}
    assert set(get_args(RunConfig.model_fields["method"].annotation)) == set(METHODS)
    assert {stage for stages in METHODS.values() for stage in stages} == set(STAGES)
    served = set(SourceConfig(builtin="demo").stages)
    assert {stage.reads for stage in STAGES.values()} == served
    shared = set(DataConfig.model_fields["stage_shares"].default)
    assert {name for stage in STAGES.values() for name in stage.shares} == shared


def test_the_report_has_a_part_for_each_stage_and_a_colour_for_each_model(tmp_path: Path) -> None:
    for name in STAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"steps": 1}))
    page = write_report(tmp_path).read_text()
    for name in STAGES:
        assert f'<section id="{name}"' in page and f'href="#{name}"' in page, name
    for model in ("base", *ANSWERING):
        assert f".tone-{model} " in page, model
