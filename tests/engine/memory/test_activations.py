"""Activations against the tensors that autograd saves."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModel, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from engine.memory import activations, measure_shape

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "opt": OPTConfig(ffn_dim=256, word_embed_proj_dim=64, max_position_embeddings=80, dropout=0.0, **SMALL),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=80, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": LlamaConfig(intermediate_size=160, num_key_value_heads=2, max_position_embeddings=80, **SMALL),
    "mixtral": MixtralConfig(intermediate_size=96, num_key_value_heads=2, num_local_experts=4, **SMALL),
}


@pytest.mark.parametrize("family", list(CONFIGS))
def test_activations_are_what_autograd_saves(family: str) -> None:
    shape = measure_shape(family, CONFIGS[family])
    body = AutoModel.from_config(CONFIGS[family], attn_implementation="sdpa").train()
    own = {t.untyped_storage().data_ptr() for t in [*body.parameters(), *body.buffers()]}
    saved: dict[int, int] = {}
    references: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in own:
            saved[storage] = tensor.untyped_storage().nbytes()
            references.append(tensor)
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        positions = torch.arange(64).expand(3, -1)
        mask: Tensor | None = torch.ones(64, 64, dtype=torch.bool).tril().expand(3, 1, 64, 64)
        if family in ("opt", "gpt2"):
            mask = None  # with a mask, the CPU's attention writes its output by heads
        body(input_ids=positions, position_ids=positions, attention_mask=mask, use_cache=False)
    found = activations(shape, tokens=3 * 64, length=64, dtype="fp32")
    assert found.total(checkpointing=False) == pytest.approx(sum(saved.values()), rel=0.05)
    assert found.block_input == 3 * 64 * 64 * 4


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
    """Kinds of layers listed for one block, masks of another form, products by expert: all can be counted."""
    found = []
    for blocks in (1, 2):
        config = AutoConfig.for_model(family, **{**SMALL, "num_hidden_layers": blocks, **fields})
        found.append(activations(measure_shape(family, config, None), tokens=64, length=64, dtype="fp32"))
    assert found[0].block == found[1].block >= 64 * 64 * 4 and found[0].outside == found[1].outside
