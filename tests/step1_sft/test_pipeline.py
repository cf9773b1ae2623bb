"""The SFT stage on two pipeline ranks equals that on one rank, and resumes exactly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.parallel import dist
from pipeline.launch.worker import read_config
from step1_sft.train import run
from tests.ranks import run_ranks
from tests.tiny import metrics, tiny_config, write_stage_configs

SFT = {"steps": 2, "save_every": 1, "micro_batch_tokens": 400, "eval_examples": 8}


def stage(folder: str, layout: dict[str, Any], again: bool) -> None:
    """Run the stage. With `again`, resume it a second time from its first step."""
    run_dir = Path(folder)
    if dist.is_rank_zero():
        write_stage_configs(
            run_dir, tiny_config(engine={"dtype": "fp32", **layout}, sft=SFT, evaluation={"prompts": 4})
        )
    dist.barrier()
    run(read_config(run_dir / "sft"), run_dir / "sft")
    if again:
        dist.barrier()
        if dist.is_rank_zero():
            shutil.copytree(run_dir / "sft" / "model", run_dir / "left alone")
            shutil.rmtree(run_dir / "sft" / "checkpoints" / "step-2")
        dist.barrier()
        run(read_config(run_dir / "sft"), run_dir / "sft")


def samples(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line)["answers"] for line in (folder / "sft" / "samples.jsonl").read_text().splitlines()]


def test_two_pipeline_ranks_train_evaluate_and_export_like_one_rank(tmp_path: Path) -> None:
    stage(str(tmp_path / "one"), {}, False)
    run_ranks(stage, 2, str(tmp_path / "two"), {"pipeline_parallel": 2}, True)
    single, together = metrics(tmp_path / "one", "sft"), metrics(tmp_path / "two", "sft")
    assert len(single) == len(together) == SFT["steps"]
    for ours, theirs in zip(together, single, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert samples(tmp_path / "two") == samples(tmp_path / "one")
    assert all(set(each) == {"base", "sft"} for each in samples(tmp_path / "two"))
    summary = json.loads((tmp_path / "two/sft/summary.json").read_text())
    predicted, measured = summary["memory"]["predicted"], summary["memory"]["measured"]
    assert measured["train"]["optimizer"] == pytest.approx(predicted["train"]["optimizer"], rel=0.02)
    weights, expected = (load_file(tmp_path / name / "sft/model/model.safetensors") for name in ("two", "one"))
    assert weights.keys() == expected.keys()
    assert all((weights[name] - expected[name]).abs().max() < 2e-4 for name in expected)  # Adam magnifies rounding
    undisturbed = load_file(tmp_path / "two" / "left alone" / "model.safetensors")
    assert all(undisturbed[name].equal(weights[name]) for name in weights), (
        "the resumed run differs from the undisturbed run"
    )
