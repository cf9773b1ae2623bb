"""Predicted bytes of a pipeline rank against sums by hand and against the tracker's measurements in training."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, OPTConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from engine import EngineConfig, OptimizerConfig, initialize
from engine.memory import ModelShape, Workload, measure_shape, pipeline_training_bytes
from engine.memory.activations import activations
from engine.memory.model_shape import pipeline_stages
from tests.engine.parallel.test_pipeline import loss_of
from tests.ranks import run_ranks

LENGTH, ROWS, MANY = 64, 2, 4
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = {
    "opt": OPTConfig(ffn_dim=256, word_embed_proj_dim=64, max_position_embeddings=80, dropout=0.0, **SMALL),
    "llama": LlamaConfig(intermediate_size=160, num_key_value_heads=2, max_position_embeddings=80, **SMALL),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"dtype": "bf16"}),
    ("opt", {}),
]


def model(family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="sdpa").float()  # type: ignore[no-any-return]


def shape(family: str) -> ModelShape:
    return measure_shape(family, CONFIGS[family])


def work(layout: dict[str, Any]) -> Workload:
    config = EngineConfig(**({"dtype": "fp32", "pipeline_parallel": 2} | layout))
    return Workload(config, micro_batch_tokens=ROWS * LENGTH, step_tokens=MANY * ROWS * LENGTH, max_length=LENGTH)


def predicted(family: str, layout: dict[str, Any]) -> list[dict[str, int]]:
    return pipeline_training_bytes(shape(family), work(layout))


def measure_peaks() -> list[dict[str, int]]:
    torch.set_num_threads(1)
    results = []
    for family, layout in CASES:
        config = EngineConfig(**({"dtype": "fp32", "pipeline_parallel": 2} | layout))
        engine = initialize(model(family), config, optimizer=OptimizerConfig(lr=1e-3))
        for step in range(2):
            ids = torch.randint(0, 96, (MANY, ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
            engine.update(list(ids), loss_of, MANY * ROWS * (LENGTH - 1))
        results.append(engine.memory_tracker.peaks["train"])
    return results


def test_stages_by_hand() -> None:
    for family in CONFIGS:
        full = shape(family)
        first, last = pipeline_stages(full, 2)
        tied = 96 * 64 if family == "opt" else 0
        assert first.parameters + last.parameters == full.parameters + tied
        assert (first.blocks, last.blocks, first.block) == (3, 2, full.block)
        assert first.parameters - 3 * first.block == first.root and first.root >= 96 * 64
        assert (first.vocabulary, last.vocabulary) == (0, 96)
    with pytest.raises(ValueError, match="pipeline_parallel=6 is more than the 5 blocks of opt"):
        pipeline_stages(shape("opt"), 6)


def test_first_ranks_hold_more_micro_batches() -> None:
    first, last = predicted("llama", {})
    one = activations(shape("llama"), work({}), tokens=ROWS * LENGTH, length=LENGTH)
    assert first["activations"] == 2 * (one.outside + 3 * one.block)  # two micro-batches, three blocks
    assert last["activations"] == one.outside + 2 * one.block
    assert predicted("llama", {"activation_checkpointing": True})[0]["activations"] < first["activations"]
    assert first["logits"] == 0 < last["logits"]


def test_two_ranks_hold_what_is_predicted() -> None:
    for rank, actual in enumerate(run_ranks(measure_peaks, 2)):
        for (family, layout), held in zip(CASES, actual, strict=True):
            expected = predicted(family, layout)[rank]
            where = f"{family} {layout} rank {rank}: {held} {expected}"
            assert held["parameters"] == pytest.approx(expected["parameters"], rel=0.02), where
            assert held["optimizer"] == pytest.approx(expected["optimizer"], rel=0.02), where
            assert held["gradients"] == pytest.approx(expected["gradients"], rel=0.05), where
            assert held.get("gathered", 0) == pytest.approx(expected["gathered"], rel=0.02), where
            softmax = ROWS * (LENGTH - 1) * 96 * 4  # saved by this test's loss, not by the model
            saved = expected["activations"] + (softmax if rank else 0)
            assert held["activations"] == pytest.approx(saved, rel=0.2), where
