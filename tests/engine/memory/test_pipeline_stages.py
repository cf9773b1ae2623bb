"""The predicted bound of a pipeline rank against sums by hand and against the tracker's measurements in training."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, OPTConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from engine import EngineConfig, OptimizerConfig, initialize
from engine.memory import (
    ModelShape,
    Workload,
    largest_pipeline_stage,
    measure_shape,
    resting_bytes,
    trained_states,
    training_bytes,
)
from engine.memory.activations import activations
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


def predicted(family: str, layout: dict[str, Any]) -> dict[str, int]:
    stage = largest_pipeline_stage(shape(family), 2)
    states = trained_states(stage, work(layout))
    return resting_bytes(states) | training_bytes(stage, work(layout), states)


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


def test_the_largest_stage_by_hand() -> None:
    """Tokens and positions of OPT, with two reserved rows; head and norm of Llama."""
    for family, root in (("opt", (96 + 82) * 64), ("llama", (96 + 1) * 64)):
        full = shape(family)
        largest = largest_pipeline_stage(full, 2)
        assert (largest.blocks, largest.block, largest.root) == (3, full.block, root)
        assert largest.parameters == root + 3 * full.block
    with pytest.raises(ValueError, match="pipeline_parallel=6 is more than the 5 blocks of opt"):
        largest_pipeline_stage(shape("opt"), 6)


def test_the_first_rank_holds_a_micro_batch_for_each_stage() -> None:
    one = activations(shape("llama"), work({}), tokens=ROWS * LENGTH, length=LENGTH)
    assert predicted("llama", {})["activations"] == 2 * (one.outside + 3 * one.block)
    recomputed = predicted("llama", {"activation_checkpointing": True})["activations"]
    assert recomputed < predicted("llama", {})["activations"]


def test_two_ranks_hold_at_most_what_is_predicted() -> None:
    first, last = run_ranks(measure_peaks, 2)
    for (family, layout), *held in zip(CASES, first, last, strict=True):
        expected, where = predicted(family, layout), f"{family} {layout}: {held}"
        for owner in ("parameters", "optimizer", "gradients", "gathered"):
            assert max(each.get(owner, 0) for each in held) == pytest.approx(expected[owner], rel=0.05), (owner, where)
        assert held[0]["activations"] == pytest.approx(expected["activations"], rel=0.2), where
        assert held[1]["activations"] < expected["activations"], where
