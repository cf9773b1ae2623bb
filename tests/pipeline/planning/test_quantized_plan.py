"""A model in 4 bits: predicted bytes against measured ones, and 8 B parameters in 24 GiB against a sum by hand."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from engine import Sampling
from engine.memory import (
    GenerationLoad,
    Workload,
    generation_bytes,
    measure_shape,
    resting_bytes,
    trained_states,
    training_bytes,
)
from pipeline.config.stage_sections import LoraConfig
from pipeline.data.batch import Documents, true_indices
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from pipeline.models.source import ModelSource
from pipeline.planning.candidates import Capacity, candidates
from pipeline.planning.planner import plan
from pipeline.planning.stage_task import PlanInputs, frozen_parameters
from tests.pipeline.models.tiny import source_drawn, trained
from tests.tiny import tiny_config

GIB = 2**30
LORA = LoraConfig(rank=16)
SMALL = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 3, "vocab_size": 1000}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}


def llama(fields: dict[str, int], heads: int) -> ModelSource:
    config = AutoConfig.for_model(
        "llama", **fields, num_attention_heads=heads, num_key_value_heads=heads // 4, tie_word_embeddings=False
    )
    return replace(source_drawn(config), quantize="nf4")


@pytest.mark.parametrize(("dtype", "quantize"), [("fp32", "nf4"), ("bf16", "nf4"), ("fp32", "none"), ("bf16", "none")])
def test_predicted_bytes_are_measured(dtype: str, quantize: str) -> None:
    source = replace(llama(SMALL, heads=4), quantize=quantize)
    engine = build_policy(source, trained(dtype, lora=LORA), generates=True)
    verify(engine, max_length=64)
    ids, documents = torch.randint(2, 900, (1, 256)), Documents((64,) * 4)
    counts = torch.ones_like(ids, dtype=torch.bool)
    counts[0, list(documents.starts)] = False
    for _ in range(2):
        engine.update([0, 1], lambda m, _: (-m(ids, true_indices(counts), documents=documents)[0].sum(), {}), 504)
    with engine.generating() as generator:
        generator.generate([[5, 6, 7]], Sampling(2, temperature=0), sample_seeds=[1])
    shape = measure_shape("small", source.config)
    layout = frozen_parameters(shape, LORA, quantize)
    work = Workload(engine.config, 1, micro_batch_tokens=256, max_length=64, step_tokens=512, is_cpu=True, **layout)
    states = trained_states(shape, work)
    predicted = resting_bytes(states) | training_bytes(shape, work, states)
    measured = engine.memory_tracker.peaks["train"]
    for owner in ("parameters", "gathered", "gradients"):
        assert predicted[owner] == measured.get(owner, 0)
    assert sum(predicted[owner] for owner in measured) == pytest.approx(sum(measured.values()), rel=0.05)
    load = GenerationLoad(slots=1)
    generation = generation_bytes(shape, work, load)
    assert generation["inference_model"] == engine.memory_tracker.peaks["generate"].get("inference_model", 0)


def test_eight_billion_parameters_fit_in_24_gib() -> None:
    """SFT, reward model and PPO with actor, critic and reward model; in 16 bits, only one copy of the weights fits."""
    gpu, lengths = Capacity(24 * GIB, 0, 0, is_gpu=True), {"max_prompt_tokens": 1024, "max_new_tokens": 1024}
    keys = {"lora": {"rank": 16}, "max_length": 2048, "micro_batch_tokens": 4096, "batch_size": 64}
    engine = {"dtype": "bf16", "activation_checkpointing": True}
    config = tiny_config(engine=engine, rollout=lengths, sft=keys, reward=keys, ppo=keys | {"ema": None})
    source = llama(LARGE, heads=32)
    for stage in ("sft", "reward", "ppo"):
        found = plan(config, stage, PlanInputs(source), ranks=1, capacity=gpu)
        assert found.fits, (stage, found.summary)
        other = plan(config, stage, PlanInputs(replace(source, quantize="none")), ranks=1, capacity=gpu)
        assert other.fits == (stage == "reward") and other.advice is None
    # By hand: 6.98e9 weights in 4.5 bits, and an embedding (twice for the actor, with its head) in bf16.
    linear, embedding = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336), 128256 * 4096
    owners = found.demand.phases["train actor"]
    assert owners["reward"] == pytest.approx(linear * 4.5 / 8 + 2 * embedding, rel=1e-3)
    assert owners["actor"] == pytest.approx(linear * 4.5 / 8 + 4 * embedding + 12 * 41.9e6, rel=1e-3)
    # No sharded parameters, no offload: those are not supported.
    task = plan(config, "ppo", PlanInputs(source), ranks=2, capacity=gpu).task
    layouts = {str(each.engine) for each in candidates(task, gpu)}
    assert layouts and not any("'zero_stage': 3" in each or "'cpu'" in each or "'nvme'" in each for each in layouts)
