"""A stage that runs out of memory restarts with smaller micro-batches and ends like one that did not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.launch import processes
from pipeline.launch.command import main
from tests.tiny import metrics

COMMAND = [
    "stage=sft", "model=tiny", "data.demo_examples=400", "ranks=2", "engine=zero2", "tracking=none", "seed=1",
    "sft.steps=6", "sft.batch_size=16", "sft.micro_batch_tokens=300", "sft.save_every=1", "sft.schedule=constant",
    "evaluation.prompts=2", "rollout.max_new_tokens=4",
]  # fmt: skip


def run(folder: Path, *more: str) -> tuple[list[dict[str, float]], dict[str, Any], dict[str, torch.Tensor]]:
    assert main([*COMMAND, f"run_dir={folder}", *more]) == 0
    summary = json.loads((folder / "sft" / "summary.json").read_text())
    return metrics(folder, "sft"), summary, load_file(folder / "sft" / "model" / "model.safetensors")


def test_a_rank_out_of_memory_in_mid_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of two ranks fails after some steps, while the other is inside of a collective."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    wanted, before, weights = run(tmp_path / "undisturbed", "ranks=1")
    assert before["out_of_memory"] == {"restarts": 0, "micro_batch_tokens": 300}
    capfd.readouterr()
    monkeypatch.setitem(processes.MODULES, "sft", "tests.out_of_memory_stage")
    monkeypatch.setenv("FAILING_ABOVE", "150")
    monkeypatch.setenv("FAILING_AFTER", "5")
    found, after, restarted = run(tmp_path / "restarted")
    output = capfd.readouterr()
    assert (
        output.err.count("sft: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB); the stage restarts")
        == 1
    )
    assert "sft.micro_batch_tokens=150 instead of 300" in output.err
    assert "sft: resumes after step " in output.out
    assert after["out_of_memory"] == {"restarts": 1, "micro_batch_tokens": 150}
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(restarted[name], weight, atol=1e-5, rtol=1e-4)


def test_one_sequence_that_does_not_fit_ends_with_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(processes.MODULES, "sft", "tests.out_of_memory_stage")
    monkeypatch.setenv("FAILING_ABOVE", "0")
    monkeypatch.setenv("FAILING_AFTER", "0")
    assert main([*COMMAND, f"run_dir={tmp_path / 'run'}", "sft.micro_batch_tokens=8"]) == 2
    output = capfd.readouterr().err
    assert "sft.micro_batch_tokens=8 is a micro-batch of one sequence" in output and "sft.max_length" in output
