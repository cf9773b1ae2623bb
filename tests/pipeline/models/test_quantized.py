"""A frozen model in 4 bits under adapters, against adapters on weights that were rounded to NF4 by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers.pytorch_utils import Conv1D

from engine import Engine, Sampling
from pipeline.config.stage_sections import LoraConfig
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.export import export_policy
from pipeline.models.quantized import BYTES_PER_WEIGHT, quantized_layers
from pipeline.models.source import ModelSource
from tests.pipeline.models.test_export import adapted_logprobs, loaded_logprobs, tokenizer
from tests.pipeline.models.tiny import (
    classifier,
    close,
    config_of,
    frozen,
    ids_of,
    language_model,
    moved,
    policy_logprobs,
    source_drawn,
    source_in,
    trained,
)
from tests.ranks import run_ranks

LORA = LoraConfig(rank=2, alpha=4.0)
# The values of NF4, from the appendix of Dettmers et al., 2023.
VALUES = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def rounded(weight: Tensor) -> Tensor:
    """A weight whose blocks of 64 numbers were divided by their largest and rounded to the nearest value of NF4."""
    blocks = weight.double().reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / scales)[..., None] - torch.tensor(VALUES, dtype=torch.float64)).abs().argmin(-1)
    return (torch.tensor(VALUES, dtype=torch.float64)[nearest] * scales).reshape(weight.shape).to(weight.dtype)


def saved(folder: Path, model: Any) -> tuple[ModelSource, ModelSource]:
    """A model in 4 bits, and the same model with weights that were rounded by hand."""
    model.save_pretrained(folder / "base")
    excluded = (model.get_output_embeddings(), getattr(model, "score", None))
    for layer in model.modules():
        if isinstance(layer, nn.Linear | Conv1D) and layer not in excluded:
            layer.weight.data = rounded(layer.weight.data)
    model.save_pretrained(folder / "rounded")
    return replace(source_in(folder / "base"), quantize="nf4"), source_in(folder / "rounded")


def factors(engine: Engine) -> dict[str, Tensor]:
    return {name: factor.clone() for name, factor in engine.adapter_parameters()}


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_adapters_learn_what_they_learn_on_rounded_weights(family: str, tmp_path: Path) -> None:
    quantized, by_hand = saved(tmp_path, language_model(config_of(family)))
    ids = ids_of(2, 9)
    engines = [build_policy(source, trained(lr=0.02, lora=LORA), generates=True) for source in (quantized, by_hand)]
    for engine in engines:
        moved(engine, updates=2)
    close(policy_logprobs(engines[0], ids), policy_logprobs(engines[1], ids))
    learned = [factors(engine) for engine in engines]
    torch.testing.assert_close(learned[0], learned[1], atol=1e-4, rtol=1e-4)
    assert all(factor.abs().max() > 0 for factor in learned[0].values())
    with engines[0].generating() as generator:  # the parity check compares it with the plain forward
        answers = generator.generate([[5, 6, 7]], Sampling(8, temperature=0), sample_seeds=[1])
    with engines[1].generating() as generator:
        merged = generator.generate([[5, 6, 7]], Sampling(8, temperature=0), sample_seeds=[1])
    assert answers[0].token_ids == merged[0].token_ids
    close(torch.tensor(answers[0].logprobs), torch.tensor(merged[0].logprobs))
    assert engines[0].flip.bytes == 0 and engines[1].flip.bytes > 0  # nothing is merged, and nothing is copied


def test_a_frozen_scorer_and_random_weights(tmp_path: Path) -> None:
    quantized, by_hand = saved(tmp_path, classifier(config_of("llama")))
    ids = ids_of(2, 9)
    scorers = [build_scorer(source, frozen(), pad_id=0) for source in (quantized, by_hand)]
    close(scorers[0](ids), scorers[1](ids))
    plain = build_policy(source_drawn(config_of("llama")), frozen())
    drawn = build_policy(replace(source_drawn(config_of("llama")), quantize="nf4"), frozen())
    for path, layer in quantized_layers(drawn.module).items():
        weight = plain.module.get_parameter(f"{path}.weight").detach()
        close(layer.dequantized(torch.float32), rounded(weight))
    bits = drawn.module.get_parameter("lm.model.embed_tokens.weight")
    assert torch.equal(bits, plain.module.get_parameter("lm.model.embed_tokens.weight"))


def test_bf16_needs_half_a_byte_for_a_weight_and_two_for_what_remains(tmp_path: Path) -> None:
    quantized, _ = saved(tmp_path, language_model(config_of("llama")))
    engine = moved(build_policy(quantized, trained("bf16", lr=0.02, lora=LORA), generates=True), updates=2)
    with engine.generating():  # the parity check passes
        pass
    assert engine.flip.bytes == 2 * sum(factor.numel() for factor in factors(engine).values())
    packed = sum(layer.in_features * layer.out_features for layer in quantized_layers(engine.module).values())
    trained_numbers = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    others = sum(p.numel() for p in engine.module.parameters()) - trained_numbers
    wanted = BYTES_PER_WEIGHT * packed + 2 * others + 4 * trained_numbers
    assert engine.memory_tracker.peaks["train"]["parameters"] == wanted


def test_both_exports_add_the_adapters_to_the_weights_before_rounding(tmp_path: Path) -> None:
    """A 4-bit weight plus a small update rounds to the same 4 bits, which would undo the training of a stage."""
    quantized, _ = saved(tmp_path, language_model(config_of("gpt2")))
    engine = moved(build_policy(quantized, trained(lr=0.02, lora=LORA)), updates=2)
    export_policy(engine, quantized, tokenizer(), tmp_path / "out", lora=LORA)
    ids = ids_of(2, 9)
    found = loaded_logprobs(tmp_path / "out", ids)
    close(found, adapted_logprobs(tmp_path / "base", tmp_path / "adapter", ids))
    assert (found - loaded_logprobs(tmp_path / "base", ids)).abs().max() > 0.01


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """ZeRO-2 in bf16 trains and generates; ZeRO-1 in fp32 trains, saves, and continues in another engine."""
    torch.set_num_threads(1)
    source = replace(source_in(folder / "base"), quantize="nf4")
    half = moved(build_policy(source, trained("bf16", zero_stage=2, lr=0.02, lora=LORA), generates=True), updates=2)
    with half.generating():
        pass
    engine = moved(build_policy(source, trained(zero_stage=1, lr=0.02, lora=LORA)), updates=2)
    engine.save(folder / "checkpoint")
    again = build_policy(source, trained(zero_stage=1, lr=0.02, lora=LORA))
    again.load(folder / "checkpoint")
    found = {
        "factors": factors(engine),
        "again": factors(moved(again, updates=2)),
        "on": factors(moved(engine, updates=2)),
    }
    return found | {"half": policy_logprobs(half, ids_of(2, 9))}


def test_two_ranks_learn_what_one_does_and_checkpoints_hold_adapters_only(tmp_path: Path) -> None:
    quantized, _ = saved(tmp_path, language_model(config_of("llama")))
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert all(torch.equal(first["again"][name], first["on"][name]) for name in first["on"])
    alone = moved(build_policy(quantized, trained(lr=0.02, lora=LORA)), updates=2)
    torch.testing.assert_close(first["factors"], factors(alone), atol=1e-4, rtol=1e-4)
    half = moved(build_policy(quantized, trained("bf16", lr=0.02, lora=LORA)), updates=2)
    torch.testing.assert_close(first["half"], policy_logprobs(half, ids_of(2, 9)), atol=0.2, rtol=0.05)
    assert torch.equal(first["half"], second["half"])
    stored = HuggingFaceStorageReader(str(tmp_path / "checkpoint")).read_metadata().state_dict_metadata
    assert len(stored) == 4 * len(first["factors"])  # the adapters, their two moments and their step counts
    assert all(".lora_" in name for name in stored)
