"""export=best: the exported step, and its checkpoint after kills, damage, early stops and rollbacks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import Engine
from pipeline.errors import RestartStage, UserError
from pipeline.stages.restart import Rollback, read_limits, read_rollbacks, roll_back, within_limits
from pipeline.stages.stage_run import StageRun
from tests.pipeline.stages.test_stage_run import lines, names, stage_of, work
from tests.tiny import finish, metrics, start_worker, tiny_config, write_stage_configs

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.0, 10: 4.0}  # held-out losses after these steps


def begin(folder: Path, **keys: Any) -> tuple[StageRun, Engine]:
    folder.mkdir(exist_ok=True)
    own = {"export": "best", "eval_every": 2, "save_every": 3, "keep_checkpoints": 1, "best_metric": "eval_loss"}
    return stage_of(folder, 10, **own | keys)


def train(stage: StageRun, engine: Engine, last: int) -> dict[int, torch.Tensor]:
    """Train like a stage up to step `last`. Return the weights after each step."""
    results = {}
    for step in stage.steps_left():
        work_without_saving(stage, engine, step)
        results[step] = engine.module.weight.detach().clone()
        if step in LOSSES:
            stage.note_best(step, "eval_loss", LOSSES[step], higher=False)
        stage.save(step)
        if step == last:
            break
    stage.checkpoints.wait()
    return results


def work_without_saving(stage: StageRun, engine: Engine, step: int) -> None:
    save, stage.save = stage.save, lambda _: None  # type: ignore[method-assign]
    work(stage, engine, step, step)
    stage.save = save  # type: ignore[method-assign]


def test_the_best_step_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage, engine = begin(tmp_path / "sft")
    stage.restore()
    weights = train(stage, engine, 10)
    assert names(stage.folder) == ["step-4", "step-10"]  # the best step and the newest step are kept
    stage.take_best()
    assert torch.equal(engine.module.weight, weights[4]) and not torch.equal(weights[4], weights[10])
    assert "sft: exports step 4 of 10, the best by eval_loss" in capsys.readouterr().out
    stage.finish({})
    summary = json.loads((stage.folder / "summary.json").read_text())
    assert (summary["exported_step"], summary["eval_loss"], summary["final"]["step"]) == (4, 1.0, 10)


@pytest.mark.parametrize(("keys", "kept"), [({}, ["step-10"]), ({"guard": "stop"}, ["step-4", "step-10"])])
def test_without_export_best_the_last_model_is_exported(keys: dict[str, Any], kept: list[str], tmp_path: Path) -> None:
    stage, engine = begin(tmp_path / "sft", export="last", **keys)
    stage.restore()
    weights = train(stage, engine, 10)
    assert names(stage.folder) == kept
    if not keys:  # with a guard, only a stage that the guard has stopped takes the best step
        stage.take_best()
    assert torch.equal(engine.module.weight, weights[10])
    stage.finish({})
    summary = json.loads((stage.folder / "summary.json").read_text())
    assert summary["exported_step"] == 10 and "eval_loss" not in summary and summary["best"] == {"eval_loss": 1.0}


@pytest.mark.parametrize("killed", [4, 5, 7, 9, 10])
def test_a_killed_stage_knows_its_best_step(tmp_path: Path, killed: int) -> None:
    full, engine = begin(tmp_path / "whole")
    full.restore()
    train(full, engine, 10)
    full.take_best()
    first, other = begin(tmp_path / "killed")
    first.restore()
    train(first, other, killed)
    again, other = begin(tmp_path / "killed", seed=7)
    assert again.restore() == max(step for step in (3, 4, 6, 9, 10) if step <= killed)
    train(again, other, 10)
    again.take_best()
    assert torch.equal(other.module.weight, engine.module.weight) and again.best == full.best
    assert [x["loss"] for x in lines(tmp_path / "killed")] == [x["loss"] for x in lines(tmp_path / "whole")]


def test_a_damaged_or_missing_best_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage, engine = begin(tmp_path / "sft")
    stage.restore()
    weights = train(stage, engine, 10)
    place = stage.folder / "checkpoints" / "step-4"
    (place / "tensors-0.safetensors").write_bytes(b"short")
    with pytest.raises(
        UserError, match=r"step-4, the checkpoint of step 4 of 10, the best by eval_loss, is damaged .* delete it"
    ):
        stage.take_best()
    shutil.rmtree(place)
    stage.take_best()
    assert torch.equal(engine.module.weight, weights[10])
    assert "exports the last step, because the checkpoint of step 4 of 10, the best by eval_loss, is gone" in (
        capsys.readouterr().out
    )
    stage.finish({})
    assert json.loads((stage.folder / "summary.json").read_text())["exported_step"] == 10


FALLING = """
calls = 0

def score(answer, row):
    global calls
    calls += 1
    return -calls
"""


def test_if_ppo_makes_answers_worse_the_sft_model_is_exported(tmp_path: Path) -> None:
    """Scores and grades fall with every call, so the evaluation before the first step is the best."""
    (tmp_path / "falling.py").write_text(FALLING)
    (tmp_path / "judge.py").write_text(FALLING.replace("-calls", "1 / calls"))
    own = {"reward_model": False, "reward_function": f"{tmp_path}/falling.py:score", "ema": None, "steps": 2}
    chosen = {"export": "best", "eval_every": 1, "save_every": 1, "keep_checkpoints": 1}
    sft = {"steps": 2, "save_every": 3, "export": "best", "eval_every": 1}
    run_dir = tmp_path / "run"
    judged = {"judge": f"{tmp_path}/judge.py:score"}
    write_stage_configs(
        run_dir, tiny_config(sft=sft, ppo={**own, **chosen, "lr": 1e-3}, evaluation={"prompts": 4, **judged})
    )
    finish(start_worker(run_dir, "sft"))
    assert json.loads((run_dir / "sft" / "summary.json").read_text())["exported_step"] == 2
    assert "ppo: exports step 0 of 2, the best by mean_gold_score" in finish(start_worker(run_dir, "ppo"))
    ours, theirs = (load_file(run_dir / stage / "model" / "model.safetensors") for stage in ("ppo", "sft"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert metrics(run_dir, "ppo")[-1]["grad_norm"] > 0
    answers = [json.loads(line)["answers"] for line in (run_dir / "ppo" / "samples.jsonl").read_text().splitlines()]
    assert all(answer["ppo"] == answer["sft"] for answer in answers)


def test_a_stage_that_stops_early_exports_its_best_step(tmp_path: Path) -> None:
    stage, engine = begin(tmp_path / "sft", export="last", guard="stop")
    stage.restore()
    weights = {}
    for step in stage.steps_left():
        work_without_saving(stage, engine, step)
        weights[step] = engine.module.weight.detach().clone()
        if step in LOSSES:
            stage.note_best(step, "eval_loss", LOSSES[step], higher=False)
        if step == 7:
            stage.last_step = step
        stage.save(step)
    assert [*weights] == [1, 2, 3, 4, 5, 6, 7]
    stage.checkpoints.wait()
    assert names(stage.folder) == ["step-4", "step-7"]
    again, other = begin(tmp_path / "sft", export="last", guard="stop", seed=7)
    assert again.restore() == 7
    again.last_step = 7
    assert list(again.steps_left()) == []
    again.take_best()
    assert torch.equal(other.module.weight, weights[4])
    again.finish({})
    summary = json.loads((again.folder / "summary.json").read_text())
    assert (summary["exported_step"], summary["steps"], summary["eval_loss"]) == (4, 7, 1.0)


def test_a_rollback_restores_the_best_step_with_a_smaller_learning_rate(tmp_path: Path) -> None:
    """Each rollback multiplies the learning rates by 0.3."""
    stage, engine = begin(tmp_path / "ppo", guard="stop", keep_checkpoints=3)
    stage.restore()
    weights = train(stage, engine, 7)
    assert names(stage.folder) == ["step-3", "step-4", "step-6"]
    message = roll_back(stage.folder, stage.checkpoints, Rollback(7, 4, "the KL rose"))
    assert isinstance(message, RestartStage) and "rolls back from step 7 to step 4 with 0.3 times" in str(message)
    assert names(stage.folder) == ["step-3", "step-4"]
    assert read_rollbacks(stage.folder) == [Rollback(7, 4, "the KL rose")]
    again, other = begin(tmp_path / "ppo", guard="stop", seed=7)
    assert again.restore() == 4 and torch.equal(other.module.weight, weights[4])
    config = tiny_config(ppo={"lr": 1e-3, "critic_lr": 1e-2})
    limited = within_limits(config, "ppo", stage.folder).ppo
    assert (limited.lr, limited.critic_lr) == pytest.approx((3e-4, 3e-3))
    assert within_limits(config, "ppo", tmp_path).ppo.lr == 1e-3
    train(again, other, 6)
    roll_back(again.folder, again.checkpoints, Rollback(6, 4, "again"))
    assert within_limits(config, "ppo", stage.folder).ppo.lr == pytest.approx(9e-5)


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"step": "a", "to": [], "reason": 3}]', '[{"step": 1}]', "{"])
def test_rollback_files_of_other_types_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "rollbacks.json").write_text(content)
    with pytest.raises(UserError, match=r"rollbacks\.json cannot be read"):
        read_rollbacks(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", '{"micro_batch_tokens": "few"}', '{"micro_batch_tokens": -5}', '{"restarts": null}', '{"a": 1}']
)
def test_limits_of_other_types_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "out_of_memory.json").write_text(content)
    with pytest.raises(UserError, match=r"out_of_memory\.json cannot be read"):
        read_limits(tmp_path)
