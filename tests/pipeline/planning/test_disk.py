"""The disk space of a run: checkpoints and exported models, and the warning where it is missing."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config.schema import RunConfig
from pipeline.planning import demand
from pipeline.planning.demand import most_checkpoints, run_bytes, stage_checkpoint, warn_of_disk
from pipeline.planning.stage_task import PlanInputs, StageTask, stage_task
from tests.pipeline.planning.test_planner import GIB, source
from tests.tiny import tiny_config

POLICY = 52_008_960  # parameters of `source`; a checkpoint has 0.58 GiB


def task_of(config: RunConfig, stage: str) -> StageTask:
    return stage_task(config, stage, PlanInputs(source()), ranks=2, is_cpu=False)


def test_a_checkpoint_has_masters_and_two_moments_of_each_model_that_trains() -> None:
    config = tiny_config()
    sft = task_of(config, "sft")
    assert sft.policy.shape.parameters == POLICY
    assert stage_checkpoint(sft) == 12 * POLICY
    ppo = task_of(tiny_config(ppo={"ema": None}), "ppo")
    assert stage_checkpoint(ppo) == 12 * (POLICY + ppo.models["critic"].shape.parameters)
    averaged = tiny_config(ppo={"ema": 0.9, "advantage": "grpo", "samples": 2})
    assert stage_checkpoint(task_of(averaged, "ppo")) == 16 * POLICY
    adapters = task_of(tiny_config(sft={"lora": {"rank": 2}}), "sft")
    assert stage_checkpoint(adapters) == 12 * adapters.policy.work.adapters < POLICY
    half = task_of(tiny_config(engine={"states": "bf16", "dtype": "bf16"}), "sft")
    assert stage_checkpoint(half) == 6 * POLICY


def most(stage: str, seconds: float = math.inf, **keys: object) -> int:
    config = tiny_config(**{stage: {"save_every": 0, **keys}})
    return most_checkpoints(config, task_of(config, stage), seconds)


def test_retained_checkpoints_and_one_that_is_written() -> None:
    assert most("sft") == most("sft", seconds=1.0) == 3
    assert most("sft", export="best") == 4
    assert most("ppo", guard="stop") == 4
    assert most("ppo", guard="off", keep_checkpoints=1) == 2


def test_large_checkpoints_are_written_every_15_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage may take twice the predicted time."""
    monkeypatch.setattr(demand, "LARGE", 12 * POLICY - 1)
    assert [most("sft", seconds=minutes * 60) for minutes in (7, 8, 15, 600)] == [1, 2, 3, 3]
    assert most("sft", seconds=60.0, save_every=5) == 3
    assert most("ppo", seconds=60.0, guard="stop") == 2


def test_a_run_keeps_the_checkpoints_of_finished_stages() -> None:
    config = tiny_config(ppo={"guard": "stop"})
    tasks = {stage: task_of(config, stage) for stage in ("sft", "ppo")}
    sft, ppo = (stage_checkpoint(task) for task in tasks.values())
    assert run_bytes(config, tasks, {"sft": math.inf, "ppo": math.inf}) == 3 * sft + 4 * ppo + 2 * 4 * POLICY


def test_a_stage_warns_of_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    task, needed = task_of(config, "sft"), 3 * 12 * POLICY + 4 * POLICY

    def warning(free: int) -> str:
        monkeypatch.setattr(demand.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        return "".join(warn_of_disk(config, task, tmp_path, math.inf))

    assert warning(needed) == ""
    text = warning(needed - 1)
    assert f"a checkpoint of this stage has about {12 * POLICY / 2**20:.0f} MiB, and up to 3 of them" in text
    assert f"they need {needed / GIB:.2f} GiB more" in text and "set sft.keep_checkpoints=1, free some" in text
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-4.tmp").mkdir()
    assert warning(needed - 12 * POLICY) == "" != warning(needed - 12 * POLICY - 1)
