import json
import math
from pathlib import Path

from pipeline.report.data import read_run
from tests.pipeline.report.example_runs import CONFIG, sample, write_stage


def test_incomplete_lines_of_metrics_are_left_out(tmp_path: Path) -> None:
    write_stage(tmp_path / "sft", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 3}])
    with (tmp_path / "sft" / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "loss": null, "guard": "x"}\n[]\n{"loss": 1}\n{"step": 4, "lo')
    stage = read_run(tmp_path).stage("sft")
    assert stage.series("loss")[:2] == [(1, 2.0), (2, 1.0)]
    assert math.isnan(stage.series("loss")[2][1])
    assert stage.series("eval_loss") == [(2, 3.0)]
    assert stage.series("guard") == []
    assert stage.last_step == 3
    assert stage.started
    assert not stage.finished


def test_an_empty_folder(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert run.stages == {}
    assert not run.stage("ppo").started
    assert run.setting("model", "name") is None
    assert run.temperatures == [] and run.samples(1.0) == []


def test_summary_figures_are_found_at_the_top_or_under_final(tmp_path: Path) -> None:
    write_stage(tmp_path / "ppo", summary={"kl": 3, "score": None, "final": {"kl": 9, "loss": 0.5}})
    stage = read_run(tmp_path).stage("ppo")
    assert (stage.number("kl"), stage.number("loss"), stage.number("score")) == (3.0, 0.5, None)


def test_damaged_summary_and_configuration_are_ignored(tmp_path: Path) -> None:
    write_stage(tmp_path / "sft", [{"step": 1}], config="a: [1")
    (tmp_path / "sft" / "summary.json").write_text('{"steps": ')
    run = read_run(tmp_path)
    assert not run.stage("sft").finished
    assert run.settings == {}


def test_configuration_of_the_furthest_stage_and_samples_of_the_furthest_that_has_some(tmp_path: Path) -> None:
    write_stage(tmp_path / "sft", samples=[sample(0, 0.5, 1)], config="seed: 1\n")
    write_stage(tmp_path / "reward", config=CONFIG.replace("seed: 1", "seed: 7"))
    (tmp_path / "manifest.json").write_text(json.dumps({"sft": {}}))
    run = read_run(tmp_path)
    assert run.setting("seed") == 7
    assert run.setting("evaluation", "table_rows") == 8
    assert len(run.samples(1.0)) == 1
    assert "sft" in run.manifest
