"""What a rank of a pipeline holds: counted before, and by the ledger while it trains."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, OPTConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from engine import EngineConfig, OptimizerConfig, initialize
from engine.memory import Shape, Workload, sft_demand
from engine.memory.pieces import pieces_of
from engine.memory.shapes import measured
from tests.engine.parallel.test_pipeline import loss_of
from tests.ranks import run_ranks

LENGTH, ROWS, MANY = 64, 2, 4
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = {
    "opt": OPTConfig(ffn_dim=256, word_embed_proj_dim=64, max_position_embeddings=80, dropout=0.0, **SMALL),
    "llama": LlamaConfig(intermediate_size=160, num_key_value_heads=2, max_position_embeddings=80, **SMALL),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("opt", {"pipeline_schedule": "gpipe"}),
    ("llama", {"activation_checkpointing": True}),
    ("llama", {"dtype": "bf16"}),
]


def model(family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="sdpa").float()  # type: ignore[no-any-return]


def shape(family: str) -> Shape:
    return measured(family, CONFIGS[family])


def work(layout: dict[str, Any]) -> Workload:
    return Workload(
        pieces=2, dtype=layout.get("dtype", "fp32"), schedule=layout.get("pipeline_schedule", "1f1b"),
        checkpointing=layout.get("activation_checkpointing", False), micro_batch_tokens=ROWS * LENGTH,
        step_tokens=MANY * ROWS * LENGTH, max_length=LENGTH,
    )  # fmt: skip


def heights() -> list[dict[str, int]]:
    torch.set_num_threads(1)
    found = []
    for family, layout in CASES:
        config = EngineConfig(**({"dtype": "fp32", "pipeline_parallel": 2} | layout))
        engine = initialize(model(family), config, optimizer=OptimizerConfig(lr=1e-3))
        for step in range(2):
            ids = torch.randint(0, 96, (MANY, ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
            engine.update(list(ids), loss_of, MANY * ROWS * (LENGTH - 1))
        found.append(engine.ledger.heights["train"])
    return found


def test_pieces_are_counted_as_they_are_cut() -> None:
    for family in CONFIGS:
        whole = shape(family)
        first, last = pieces_of(whole, 2)
        tied = 96 * 64 if family == "opt" else 0
        assert first.parameters + last.parameters == whole.parameters + tied
        assert (first.blocks, last.blocks, first.block) == (3, 2, whole.block)
        assert first.parameters - 3 * first.block == first.root and first.root >= 96 * 64
        assert (first.vocabulary, last.vocabulary) == (0, 96)


def test_first_ranks_keep_more_micro_batches() -> None:
    demands = {
        (schedule, recompute): sft_demand(
            shape("llama"), work({"pipeline_schedule": schedule, "activation_checkpointing": recompute})
        ).phases
        for schedule in ("1f1b", "gpipe")
        for recompute in (False, True)
    }
    in_turn, at_once = demands["1f1b", False], demands["gpipe", False]
    assert at_once["train"]["activations"] == 2 * in_turn["train"]["activations"]
    assert at_once["train, piece 2"]["activations"] == 4 * in_turn["train, piece 2"]["activations"]
    assert demands["1f1b", True]["train"]["activations"] < in_turn["train"]["activations"]
    assert in_turn["train"]["logits"] == 0 < in_turn["train, piece 2"]["logits"]
    # A gradient comes back for each of four micro-batches, and two outputs wait; the last rank only receives.
    message = ROWS * LENGTH * 64 * 4
    assert in_turn["train"]["messages"] == 6 * message and in_turn["train, piece 2"]["messages"] == 4 * message
    assert in_turn["generate"]["twin"] == 4 * shape("llama").parameters


def test_two_ranks_hold_what_is_predicted() -> None:
    for rank, found in enumerate(run_ranks(heights, 2)):
        for (family, layout), held in zip(CASES, found, strict=True):
            wanted = sft_demand(shape(family), work(layout)).phases["train, piece 2" if rank else "train"]
            where = f"{family} {layout} rank {rank}: {held} {wanted}"
            assert held["parameters"] == pytest.approx(wanted["parameters"], rel=0.02), where
            assert held["optimizer"] == pytest.approx(wanted["optimizer"], rel=0.02), where
            assert held["gradients"] == pytest.approx(wanted["gradients"], rel=0.05), where
            assert held.get("gathered", 0) == pytest.approx(wanted["gathered"], rel=0.02), where
            softmax = ROWS * (LENGTH - 1) * 96 * 4  # what the loss here keeps, beside the model
            kept = wanted["activations"] + (softmax if rank else 0)
            assert held["activations"] == pytest.approx(kept, rel=0.2), where
