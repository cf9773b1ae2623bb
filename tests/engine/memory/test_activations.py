"""Predicted activation bytes against the tensors that autograd saves."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
)

from engine import EngineConfig, Generator, Sampling
from engine.memory import GenerationLoad, Workload, generation_bytes, measure_shape
from engine.memory.activations import activations

FP32 = Workload(EngineConfig(dtype="fp32"))
SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "opt": OPTConfig(ffn_dim=256, word_embed_proj_dim=64, max_position_embeddings=80, dropout=0.0, **SMALL),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=80, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": LlamaConfig(intermediate_size=160, num_key_value_heads=2, max_position_embeddings=80, **SMALL),
    "mixtral": MixtralConfig(intermediate_size=96, num_key_value_heads=2, num_local_experts=4, **SMALL),
}


def saved_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes that autograd saves in a forward of a model, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}
    references: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in own:
            saved[storage] = tensor.untyped_storage().nbytes()
            references.append(tensor)
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        forward()
    return sum(saved.values())


@pytest.mark.parametrize("family", list(CONFIGS))
def test_activations_are_what_autograd_saves(family: str) -> None:
    shape = measure_shape(family, CONFIGS[family])
    body = AutoModel.from_config(CONFIGS[family], attn_implementation="sdpa").train()
    ids = torch.arange(64).expand(3, -1)
    mask: Tensor | None = torch.ones(64, 64, dtype=torch.bool).tril().expand(3, 1, 64, 64)
    if family in ("opt", "gpt2"):
        mask = None  # with a mask, the CPU's attention stores its output by heads
    saved = saved_bytes(body, partial(body, ids, position_ids=ids, attention_mask=mask, use_cache=False))
    actual = activations(shape, FP32, tokens=3 * 64, length=64)
    assert actual.outside + 3 * actual.block == pytest.approx(saved, rel=0.05)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        ("bloom", {}),
        ("mamba", {"state_size": 4}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_one_block_is_half_of_two(family: str, fields: dict[str, Any]) -> None:
    """The count supports lists of layer types, other mask formats and experts."""
    results = []
    for blocks in (1, 2):
        config = AutoConfig.for_model(family, **{**SMALL, "num_hidden_layers": blocks, **fields})
        results.append(activations(measure_shape(family, config, None), FP32, tokens=64, length=64))
    assert results[0].block == results[1].block >= 64 * 64 * 4 and results[0].outside == results[1].outside


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_prefill_stays_below_its_prediction(family: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    generator, prompts = Generator(model, "cpu"), [[7 + i % 50] * 40 for i in range(16)]
    call = partial(generator.generate, prompts, Sampling(4), range(16), 16)
    call()  # allocates the cache
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    work = Workload(EngineConfig(dtype="fp32"), is_cpu=True)
    load = GenerationLoad(prompt=40, response=4, slots=16)
    shape = measure_shape(family, CONFIGS[family])
    predicted = generation_bytes(shape, work, load)
    assert 0.5 < peak / (predicted["prefill"] + predicted["logits"]) < 1
