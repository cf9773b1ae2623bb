"""The profiler: selected steps, the contents of its files, and unchanged training."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.schema import ProfileSection
from tests.pipeline.stages.test_stage_run import stage_of, work
from tests.ranks import run_ranks


def spans(trace: Path) -> list[str]:
    """Return the names of a trace's spans in order."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["name"] for event in sorted((e for e in events if "ts" in e), key=lambda e: e["ts"])]


def on_two_ranks(folder: Path) -> None:
    for ranks in ("first", "all"):
        run(folder / ranks, [2, 2], ranks=ranks)


def run(folder: Path, steps: list[int], *, ranks: str = "first") -> Any:
    """Run six steps and record some of them."""
    folder.mkdir(exist_ok=True)
    stage, engine = stage_of(folder, 6, save_every=2, profile=ProfileSection(steps=steps, ranks=ranks))
    stage.restore()
    for step in stage.steps_left():
        work(stage, engine, step, step)
    stage.checkpoints.wait()
    return stage


def test_the_selected_steps_are_recorded_with_their_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "sft", [3, 4])
    actual = tmp_path / "sft" / "profile"
    assert sorted(path.name for path in actual.iterdir()) == ["steps-3-4-rank-0.json.gz", "steps-3-4-rank-0.txt"]
    names = spans(actual / "steps-3-4-rank-0.json.gz")
    assert names.count("train") == 2 and names.count("save") == 1
    assert names.count("aten::linear") == 2 and names.index("train") < names.index("aten::linear")
    text = (actual / "steps-3-4-rank-0.txt").read_text()
    assert "Self CPU" in text and "aten::addmm" in text
    assert f"sft: steps 3 to 4 recorded, {actual}/steps-3-4-rank-0.txt" in capsys.readouterr().out


def test_shorter_and_resumed_stages_record_their_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", [6, 9])
    assert (tmp_path / "a" / "profile" / "steps-6-6-rank-0.txt").exists()
    stage, engine = stage_of(tmp_path / "a", 8, save_every=2, profile=ProfileSection(steps=[5, 7]))
    assert stage.restore() == 6
    for step in stage.steps_left():
        work(stage, engine, step, step)
    stage.checkpoints.wait()
    assert (tmp_path / "a" / "profile" / "steps-7-7-rank-0.txt").exists()
    capsys.readouterr()
    (tmp_path / "b").mkdir()
    stage, _ = stage_of(tmp_path / "b", 6, profile=ProfileSection(steps=[7, 9]))
    assert next(stage.steps_left()) == 1  # the message comes before the first step, and not after hours
    assert "b: none of the steps 7 to 9 (profile.steps) is left to record" in capsys.readouterr().out


def test_one_rank_is_recorded_or_all(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
    for ranks, recorded in (("first", [0]), ("all", [0, 1])):
        actual = sorted(path.name for path in (tmp_path / ranks / "profile").iterdir())
        assert actual == [f"steps-2-2-rank-{rank}.{end}" for rank in recorded for end in ("json.gz", "txt")]


def test_recording_does_not_change_the_training(tmp_path: Path) -> None:
    torch.manual_seed(5)
    recorded = run(tmp_path / "a", [2, 5])
    torch.manual_seed(5)
    plain = run(tmp_path / "b", [7, 9])
    assert recorded.last["loss"] == plain.last["loss"]
