"""A stage that runs out of memory restarts with smaller micro-batches and gives the result of an undisturbed run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forked_launch import launch
from tests.ranks import Worker
from tests.tiny import metrics

COMMAND = [
    "stage=sft", "model=tiny", "data.demo_examples=400", "ranks=2", "engine=zero2", "tracking=none", "seed=1",
    "sft.steps=4", "sft.batch_size=16", "sft.micro_batch_tokens=300", "sft.save_every=1", "sft.schedule=constant",
    "evaluation.prompts=2", "rollout.max_new_tokens=4", "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=128",
]  # fmt: skip


def run(folder: Path, *more: str, status: int = 0, **failing: str) -> tuple[str, str]:
    """Run the stage and return its output and errors. With `failing`, the variables of out_of_memory_stage.py, rank 1
    runs out of memory.
    """
    modules = {"sft": "tests.out_of_memory_stage"} if failing else {}
    arguments = [*COMMAND, f"run_dir={folder / 'run'}", *more]
    folder.mkdir()
    worker = Worker(launch_with_errors_in, folder, arguments, modules, environment={"OMP_NUM_THREADS": "1", **failing})
    output, errors = worker.communicate()[0], (folder / "errors").read_text()
    assert worker.returncode == status, output + errors
    return output, errors


def launch_with_errors_in(folder: Path, arguments: list[str], modules: dict[str, str]) -> None:
    os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT), 2)
    launch(folder, arguments, modules)


def results(folder: Path) -> tuple[list[dict[str, float]], dict[str, Any], dict[str, torch.Tensor]]:
    run_dir = folder / "run"
    summary = json.loads((run_dir / "sft" / "summary.json").read_text())
    return metrics(run_dir, "sft"), summary, load_file(run_dir / "sft" / "model" / "model.safetensors")


def test_restart_after_out_of_memory_equals_undisturbed_run(tmp_path: Path) -> None:
    """One of two ranks runs out of memory after some steps, while the other waits in a collective."""
    run(tmp_path / "undisturbed", "ranks=1")
    expected, before, weights = results(tmp_path / "undisturbed")
    assert before["out_of_memory"] == {"restarts": 0, "micro_batch_tokens": 300}
    output, errors = run(tmp_path / "restarted", FAILING_ABOVE="150", FAILING_AFTER="3")
    assert errors.count("sft: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB); the stage restarts") == 1
    assert "sft.micro_batch_tokens=150 instead of 300" in errors
    assert "sft: resumes after step " in output
    actual, after, restarted = results(tmp_path / "restarted")
    assert after["out_of_memory"] == {"restarts": 1, "micro_batch_tokens": 150}
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(restarted[name], weight, atol=1e-5, rtol=1e-4)


def test_one_sequence_that_does_not_fit_names_the_keys_to_change(tmp_path: Path) -> None:
    less = "sft.micro_batch_tokens=8"
    _, errors = run(tmp_path / "one", less, status=2, FAILING_ABOVE="0", FAILING_AFTER="0")
    assert "sft.micro_batch_tokens=8 is a micro-batch of one sequence" in errors and "sft.max_length" in errors
