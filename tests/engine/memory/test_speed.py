"""Predicted seconds against sums worked out by hand, and the probe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine import EngineConfig
from engine.memory import CostModel, ModelShape, Probe, Workload, measure_shape, measure_speed, speed
from engine.memory.speed import _disk_seconds
from tests.ranks import run_ranks

PROBE = Probe(
    forward=1e-9, backward=2e-9, decode=1e-7, head=1e-4, adam=1e-9, host_adam=4e-9, all_reduce=1e-9, copy=1e-10,
    disk=1e-9,
)  # fmt: skip


def llama() -> ModelShape:
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=4, intermediate_size=64, vocab_size=96, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return measure_shape("llama", config)


def model(shape: ModelShape, *, ranks: int = 1, tokens: int = 400, is_gpu: bool = False, **layout: Any) -> CostModel:
    work = Workload(EngineConfig(**{"dtype": "fp32", **layout}), ranks, micro_batch_tokens=100, step_tokens=400)
    return CostModel(shape, work, PROBE, is_gpu, tokens)


def test_communication_by_stage() -> None:
    shape = llama()
    compute = 400 * (4 * shape.block * 3e-9 + 1e-4)
    once = 4 * shape.parameters * 1e-9  # an all-reduce; a gather or a reduce-scatter costs half of it
    for stage, sent in enumerate((1.0, 1.0, 0.5 + 4 * 0.5, 4 * 1.5)):
        found = model(shape, ranks=2, zero_stage=stage)
        assert found.training_seconds() == pytest.approx(compute + sent * once)
        on_gpu = model(shape, ranks=2, zero_stage=stage, is_gpu=True)
        assert on_gpu.training_seconds() == pytest.approx(max(compute, sent * once))


def test_offloaded_states_are_read_and_written() -> None:
    shape = llama()
    files = model(shape, zero_stage=3, dtype="bf16", offload_optimizer="nvme", offload_parameters="nvme")
    compute = 400 * (4 * shape.block * 3e-9 + 1e-4)
    assert files.training_seconds() == pytest.approx(compute + 4 * 2 * 2 * shape.parameters * 1e-9)
    assert files.optimizer_seconds() == pytest.approx(shape.parameters * 24 * 1e-9)
    host = model(shape, zero_stage=2, dtype="bf16", offload_optimizer="cpu")
    assert host.optimizer_seconds() == pytest.approx(shape.parameters * (4e-9 + 2 * 2 * 1e-10))


def test_checkpointing_scoring_and_generation() -> None:
    shape = llama()
    forward = 400 * 4 * shape.block * 1e-9
    found = model(shape, activation_checkpointing=True)
    assert found.training_seconds(head_share=0.5) == pytest.approx(4 * forward + 400 * 0.5 * 1e-4)
    assert found.scoring_seconds(head_share=0.5) == pytest.approx(forward + 400 * 0.5 * 1e-4 / 3)
    wanted = 0.9 * forward + 20 * (4 * shape.block * 1e-7 + 2 * 1e-4 / 3)
    assert found.generation_seconds(steps=20, slots=2, prompt_share=0.9) == pytest.approx(wanted)


def test_sequence_groups_share_tokens_and_pipelines_share_blocks() -> None:
    shape = llama()
    blocks, once = 4 * shape.block * 3e-9, 4 * shape.parameters * 1e-9
    groups = model(shape, ranks=4, sequence_parallel=2)
    assert groups.training_seconds() == pytest.approx(200 * (blocks + 1e-4) + once)
    pipeline = model(shape, pipeline_parallel=2)
    assert pipeline.training_seconds() == pytest.approx(5 / 4 * 400 * (blocks + 1e-4) / 2)
    assert pipeline.optimizer_seconds() == pytest.approx(shape.parameters / 2 * 1e-9)


def test_the_disk_probe_leaves_no_file(tmp_path: Path) -> None:
    assert _disk_seconds(str(tmp_path)) > 0
    assert not list(tmp_path.iterdir())


def probed() -> dict[str, Any]:
    torch.set_num_threads(1)
    speed.OPTIMIZER_PARAMETERS, speed.FILE_BYTES = 2**16, 2**20
    return vars(measure_speed(llama(), dtype="fp32", length=32, rows=2))


def test_the_probe_measures_on_two_ranks() -> None:
    first, second = run_ranks(probed, 2)
    assert all(first[name] > 0 for name in ("forward", "backward", "decode", "head", "adam", "all_reduce", "disk"))
    assert first["copy"] == 0
    assert first["forward"] == second["forward"], "every rank has the rates of the slowest"
