"""Predicted seconds against sums worked out by hand, and the probe of a tensor-parallel rank's share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine import EngineConfig
from engine.memory import CostModel, ModelShape, Probe, Workload, measure_shape, measure_speed
from engine.memory.model_shape import pipeline_stages
from engine.memory.probe import FILE_BYTES, _disk_seconds, build_body
from engine.offload.direct_io import ScratchFile
from engine.parallel import dist
from tests.ranks import run_ranks

PROBE = Probe(
    forward=1e-5, backward=2e-5, decode=1e-3, head=1e-4, adam=1e-9, host_adam=4e-9, all_reduce=1e-9, copy=1e-10,
    disk=1e-9,
)  # fmt: skip


def llama(tensor: int = 1, blocks: int = 4) -> ModelShape:
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=blocks, intermediate_size=64, vocab_size=96, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return measure_shape("llama", config, tensor=tensor)


def model(shape: ModelShape, *, ranks: int = 1, tokens: int = 400, is_gpu: bool = False, **layout: Any) -> CostModel:
    work = Workload(EngineConfig(**{"dtype": "fp32", **layout}), ranks, micro_batch_tokens=100, step_tokens=400)
    return CostModel(shape, work, PROBE, is_gpu, tokens)


def test_communication_by_stage() -> None:
    shape = llama()
    compute = 400 * (4 * 3e-5 + 1e-4)
    once = 4 * shape.parameters * 1e-9  # an all-reduce; a gather or a reduce-scatter costs half of it
    for stage, sent in enumerate((1.0, 1.0, 0.5 + 4 * 0.5, 4 * 1.5)):
        found = model(shape, ranks=2, zero_stage=stage)
        assert found.training_seconds() == pytest.approx(compute + sent * once)
        on_gpu = model(shape, ranks=2, zero_stage=stage, is_gpu=True)
        assert on_gpu.training_seconds() == pytest.approx(max(compute, sent * once))


def test_offloaded_states_are_read_and_written() -> None:
    shape = llama()
    files = model(shape, zero_stage=3, dtype="bf16", offload_optimizer="nvme", offload_parameters="nvme")
    compute = 400 * (4 * 3e-5 + 1e-4)
    assert files.training_seconds() == pytest.approx(compute + 4 * 2 * 2 * shape.parameters * 1e-9)
    assert files.optimizer_seconds() == pytest.approx(shape.parameters * 24 * 1e-9)
    host = model(shape, zero_stage=2, dtype="bf16", offload_optimizer="cpu")
    assert host.optimizer_seconds() == pytest.approx(shape.parameters * (4e-9 + 2 * 2 * 1e-10))


def test_checkpointing_scoring_and_generation() -> None:
    shape = llama()
    forward = 400 * 4 * 1e-5
    found = model(shape, activation_checkpointing=True)
    assert found.training_seconds(head_share=0.5) == pytest.approx(2 * forward + 400 * (4 * 2e-5 + 0.5 * 1e-4))
    assert found.scoring_seconds(head_share=0.5) == pytest.approx(forward + 400 * 0.5 * 1e-4 / 3)
    wanted = 0.9 * forward + 20 * (4 * 1e-3 + 2 * 1e-4 / 3)
    assert found.generation_seconds(steps=20, slots=2, prompt_share=0.9) == pytest.approx(wanted)


def test_a_tensor_group_sums_inside_of_blocks() -> None:
    found = model(llama(tensor=2), tensor_parallel=2, activation_checkpointing=True)
    each = 32 * 4 * 1e-9  # one token's hidden states
    forward = 4 * 400 * (1e-5 + 2 * each)
    assert found.training_seconds() == pytest.approx(2 * forward + 400 * (4 * (2e-5 + 2 * each) + 1e-4))


def test_a_sequence_group_exchanges_inside_of_blocks() -> None:
    shape = llama()
    found = model(shape, ranks=4, sequence_parallel=2)
    each = 0.5 * (32 + 16 + 16 + 32) * 4 * 1e-9  # queries, keys and values of half the heads, the attention output
    wire = 2 * 0.5 * 4 * shape.parameters * 1e-9  # gradients, at stage 0
    assert found.training_seconds() == pytest.approx(200 * (4 * (3e-5 + 2 * each) + 1e-4) + wire)


def test_a_pipeline_takes_turns_of_its_slowest_stage() -> None:
    shape = llama(blocks=5)
    found = model(shape, pipeline_parallel=2)
    last = 2 * 400 * 3e-5 + 400 * 1e-4  # the first stage has three blocks and no head
    assert found.training_seconds() == pytest.approx(5 / 4 * (last + 400 * 32 * 4 * 1e-9))
    largest = max(stage.parameters for stage in pipeline_stages(shape, 2))
    assert found.optimizer_seconds() == pytest.approx(largest * 1e-9)


def test_the_disk_probe_bypasses_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads and writes every byte as the tiers do, and leaves no file."""
    moved: list[tuple[str, int]] = []
    transfer = ScratchFile._transfer

    def counted(file: ScratchFile, move: Any, view: memoryview, offset: int) -> None:
        transfer(file, move, view, offset)
        moved.append((move.__name__, len(view)))

    monkeypatch.setattr(ScratchFile, "_transfer", counted)
    assert _disk_seconds(str(tmp_path)) > 0
    for way in ("pwritev", "preadv"):
        assert sum(size for name, size in moved if name == way) == FILE_BYTES
    assert not list(tmp_path.iterdir())


def probed() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    dist.arrange(tensor=2)
    half, full = llama(tensor=2), llama()
    rates = measure_speed(half, dtype="fp32", length=32, rows=2)
    counts = [
        sum(p.numel() for p in build_body(shape, 2, "fp32", dist.world().device).parameters()) for shape in (half, full)
    ]
    return [vars(rates), {"half": counts[0], "full": counts[1]}]


def test_the_probe_runs_a_ranks_share_of_a_block() -> None:
    for rates, counts in run_ranks(probed, 2):
        assert all(rates[name] > 0 for name in ("forward", "backward", "decode", "head", "all_reduce"))
        embedding, norms = 96 * 32, 5 * 32
        assert counts["half"] - embedding - norms == (counts["full"] - embedding - norms) / 2
