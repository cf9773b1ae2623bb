"""Predicted seconds against sums by hand, rates of the GPU table, and measured rates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine import EngineConfig
from engine.memory import (
    GPUS,
    CostModel,
    ModelShape,
    Rates,
    Workload,
    largest_pipeline_stage,
    measure_rates,
    measure_shape,
    rates,
    tabulated_rates,
)
from tests.ranks import run_ranks

RATES = Rates(
    forward=1e-9, backward=2e-9, decode=1e-7, head=1e-4, adam=1e-9, host_adam=4e-9, all_reduce=1e-9,
)  # fmt: skip


def llama() -> ModelShape:
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=4, intermediate_size=64, vocab_size=96, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return measure_shape("llama", config)


def model(shape: ModelShape, *, ranks: int = 1, tokens: int = 400, is_gpu: bool = False, **layout: Any) -> CostModel:
    config = EngineConfig(**{"dtype": "fp32", **layout})
    work = Workload(config, ranks, micro_batch_tokens=100, step_tokens=400, is_cpu=not is_gpu)
    return CostModel(shape, work, RATES, tokens)


def test_communication_by_stage() -> None:
    shape = llama()
    compute = 400 * (4 * shape.block * 3e-9 + 1e-4)
    once = 4 * shape.parameters * 1e-9  # an all-reduce; a gather or a reduce-scatter costs half as much
    for stage, sent in enumerate((1.0, 1.0, 0.5 + 4 * 0.5, 4 * 1.5)):
        actual = model(shape, ranks=2, zero_stage=stage)
        assert actual.training_seconds() == pytest.approx(compute + sent * once)
        on_gpu = model(shape, ranks=2, zero_stage=stage, is_gpu=True)
        assert on_gpu.training_seconds() == pytest.approx(max(compute, sent * once))


def test_offloaded_states_are_read_and_written() -> None:
    shape = llama()
    files = model(shape, zero_stage=3, dtype="bf16", offload_optimizer="nvme", offload_parameters="nvme")
    compute = 400 * (4 * shape.block * 3e-9 + 1e-4)
    assert files.training_seconds() == pytest.approx(compute + 4 * 2 * 2 * shape.parameters / 3e9)
    assert files.optimizer_seconds() == pytest.approx(shape.parameters * 24 / 3e9)
    host = model(shape, zero_stage=2, dtype="bf16", offload_optimizer="cpu")
    assert host.optimizer_seconds() == pytest.approx(shape.parameters * 4e-9)
    copied = model(shape, is_gpu=True, zero_stage=2, dtype="bf16", offload_optimizer="cpu")
    assert copied.optimizer_seconds() == pytest.approx(shape.parameters * (4e-9 + 2 * 2 / 25e9))


def test_checkpointing_scoring_and_generation() -> None:
    shape = llama()
    forward = 400 * 4 * shape.block * 1e-9
    actual = model(shape, activation_checkpointing=True)
    assert actual.training_seconds(head_share=0.5) == pytest.approx(4 * forward + 400 * 0.5 * 1e-4)
    assert actual.scoring_seconds(head_share=0.5) == pytest.approx(forward + 400 * 0.5 * 1e-4 / 3)
    expected = 0.9 * forward + 20 * (4 * shape.block * 1e-7 + 2 * 1e-4 / 3)
    assert actual.generation_seconds(steps=20, slots=2, prompt_share=0.9) == pytest.approx(expected)
    cache = 20 * 2 * 300 * (2 * 4 * 2 * 8 * 4) * 1e-9 / 28  # keys and values of 4 layers, 2 heads of 8 numbers in fp32
    long = actual.generation_seconds(steps=20, slots=2, prompt_share=0.9, context=300)
    assert long == pytest.approx(expected + cache)


def test_sequence_groups_share_tokens_and_pipelines_share_blocks() -> None:
    shape = llama()
    blocks, once = 4 * shape.block * 3e-9, 4 * shape.parameters * 1e-9
    groups = model(shape, ranks=4, sequence_parallel=2)
    assert groups.training_seconds() == pytest.approx(200 * (blocks + 1e-4) + once)
    stage = largest_pipeline_stage(shape, 2)  # two of four blocks
    pipeline = model(stage, pipeline_parallel=2)
    assert pipeline.training_seconds() == pytest.approx(5 / 4 * 400 * (blocks / 2 + 1e-4))
    assert pipeline.optimizer_seconds() == pytest.approx(stage.parameters * 1e-9)


def measured() -> dict[str, Any]:
    torch.set_num_threads(1)
    rates.PARAMETERS["cpu"] = 2**16
    return vars(measure_rates(llama(), dtype="fp32", length=32, rows=2))


def test_rates_are_measured_on_two_ranks() -> None:
    first, second = run_ranks(measured, 2)
    assert all(first[name] > 0 for name in ("forward", "backward", "decode", "head", "adam", "all_reduce"))
    assert first["forward"] == second["forward"], "every rank must use the rates of the slowest rank"


def test_measurements_of_a_gpu_take_longer_than_the_launches() -> None:
    """At the rates of an H100, each takes at least 0.2 ms. The host launches an optimizer step in about 0.1 ms."""
    width, tokens = rates.WIDEST["cuda"], rates.TOKENS["cuda"]
    head = ModelShape(0, root=0, block=0, width=width, vocabulary=rates.HEAD_ROWS["cuda"])
    h100 = tabulated_rates(GPUS["h100"], head, dtype="bf16", ranks=8)
    seconds = {
        "block": h100.forward * tokens * 12 * width**2,
        "head": h100.head * tokens / 4,
        "adam": h100.adam * rates.PARAMETERS["cuda"],
        "all_reduce": h100.all_reduce * rates.MESSAGE_BYTES["cuda"],
    }
    assert min(seconds.values()) > 2e-4, seconds


@pytest.mark.parametrize(("rows", "decode"), [(1, 2e-12), (64, 64e-13)])
def test_a_decode_step_of_a_gpu_does_not_wait_for_the_host(
    rows: int, decode: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads 2 bytes of each parameter, or computes the products of many rows. AdamW reads and writes 28 bytes."""
    world = SimpleNamespace(device=torch.device("cuda"), size=1)
    monkeypatch.setattr(rates.dist, "world", lambda: world)
    launched_by_the_host = 1e-10
    monkeypatch.setattr(rates, "_block_seconds", lambda *_: (1e-13, 2e-13, launched_by_the_host))
    monkeypatch.setattr(rates, "_adam_seconds", lambda device: 28e-12)
    monkeypatch.setattr(rates, "_head_seconds", lambda *_: 0.0)
    measured = measure_rates(llama(), dtype="bf16", length=32, rows=rows)
    assert measured.decode == pytest.approx(decode, rel=1e-6, abs=0)


def test_rates_of_a_data_sheet() -> None:
    """An A100 (312 TFLOPS, 2,039 GB/s, 300 GB/s) reaches 40 % of its compute peak and 60 % of its bandwidths."""
    shape = llama()
    actual = tabulated_rates(GPUS["a100"], shape, dtype="bf16", ranks=8)
    assert actual.forward == pytest.approx(2 / 124.8e12, rel=1e-6, abs=0) and actual.backward == 2 * actual.forward
    assert actual.head == pytest.approx(6 * 96 * 32 / 124.8e12, rel=1e-6, abs=0)
    assert actual.decode == pytest.approx(2 / 1223.4e9, rel=1e-6, abs=0) and actual.adam == pytest.approx(
        28 / 1223.4e9, rel=1e-6, abs=0
    )
    assert actual.all_reduce == pytest.approx(2 / 300e9, rel=1e-6, abs=0)
    many = tabulated_rates(GPUS["a100"], shape, dtype="fp32", ranks=16)
    assert many.all_reduce == pytest.approx(2 / 50e9, rel=1e-6, abs=0) and many.forward == pytest.approx(
        16 * actual.forward, rel=1e-6, abs=0
    )
    assert many.decode == pytest.approx(2 * actual.decode, rel=1e-6, abs=0)
