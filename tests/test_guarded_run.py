"""A guarded PPO stage that is killed and resumed rolls back exactly as an undisturbed one does.

The guard rule of this test fires at a large learning rate.
"""

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.launch.failure import RESTART
from pipeline.launch.worker import run_worker
from step3_ppo import guard, guard_rules
from step3_ppo.guard_rules import Finding, Row
from tests.ranks import Worker
from tests.test_resume import assert_equal_runs, wait_for_lines
from tests.tiny import copy_stages, finish, metrics, start_worker, tiny_config, write_stage_configs

RISING = """
from pathlib import Path

def grade(answer, row):
    log = Path(__file__).parent / "ppo" / "metrics.jsonl"
    return len(log.read_text().splitlines()) / 100 if log.exists() else 0.0
"""


def large_rate(rows: Sequence[Row]) -> Finding | None:
    """Fire at a learning rate above 5e-5 from step 3 on."""
    return Finding("rate", "the rate is large") if rows[-1]["step"] >= 3 and rows[-1]["lr"] > 5e-5 else None


def run_with_rule(stage: str, run_dir: Path, module: str) -> None:
    """Run a stage with `large_rate` as its only guard rule."""
    guard_rules.ROLLOUT_RULES, guard_rules.FEWEST_ANSWERS = (large_rate,), 1
    guard.WATCHED = (*guard.WATCHED, "lr")
    run_worker(stage, run_dir, module)


def start(run_dir: Path) -> Worker:
    return Worker(run_with_rule, "ppo", run_dir, "step3_ppo.train", environment={"OMP_NUM_THREADS": "1"})


def kill_after(run_dir: Path, lines: int) -> None:
    """Start the stage and kill it when `lines` lines are in its log."""
    worker = start(run_dir)
    wait_for_lines(worker, run_dir / "ppo", lines)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()


def write_models(run_dir: Path) -> None:
    """Train an SFT model and a reward model."""
    few = {"steps": 1, "batch_size": 4, "eval_examples": 4}
    write_stage_configs(run_dir, tiny_config(sft=few, reward=few, evaluation={"prompts": 2, "best_of": 1}))
    for stage in ("sft", "reward"):
        finish(start_worker(run_dir, stage))


def guarded_run(folder: Path, trained: Path) -> Path:
    """Return a run whose judge grades later answers higher, so that step 2 is the best step before step 3."""
    folder.mkdir()
    (folder / "judge.py").write_text(RISING)
    ppo = {"guard": "rollback", "eval_every": 2, "lr": 1e-4, "schedule": "constant", "warmup": 0.0, "ema": None}
    judged = {"prompts": 4, "best_of": 1, "temperatures": [1.0], "judge": f"{folder}/judge.py:grade"}
    write_stage_configs(folder, tiny_config(ppo={**ppo, "save_every": 1}, evaluation=judged))
    copy_stages(trained, folder, "sft", "reward")
    return folder


def summary(run_dir: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((run_dir / "ppo" / "summary.json").read_text())
    return actual


def test_killed_rollback_resumes_from_the_best_step(tmp_path: Path) -> None:
    write_models(tmp_path / "trained")
    undisturbed, killed = guarded_run(tmp_path / "whole", tmp_path / "trained"), tmp_path / "killed"
    worker = start(undisturbed)
    output, _ = worker.communicate(timeout=240)
    assert worker.returncode == RESTART, output
    shutil.copytree(undisturbed, killed)
    config = killed / "ppo" / "config.yaml"
    config.write_text(config.read_text().replace(str(undisturbed), str(killed)))  # the path of the judge
    assert "resumes after step 2 of 6" in finish(start(undisturbed))
    actual = summary(undisturbed)
    assert actual["guard"]["rollbacks"] == [{"step": 3, "to": 2, "reason": "the rate is large"}]
    assert actual["guard"]["findings"] == [] and actual["exported_step"] == 6
    lines = metrics(undisturbed, "ppo")
    assert [line["lr"] for line in lines[1:]] == pytest.approx([1e-4, 1e-4, 3e-5, 3e-5, 3e-5, 3e-5])
    assert lines[3]["guard"] == "guard: rolled back from step 3, because the rate is large"
    kill_after(killed, 5)
    finish(start(killed))
    assert_equal_runs(undisturbed, killed, "ppo", "rolled back")
