"""Parameter counts of models on the meta device against counts by hand, also for one tensor-parallel rank."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, OPTConfig

from engine.memory import Workload, measure_shape
from engine.memory.activations import activations

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT = OPTConfig(ffn_dim=256, word_embed_proj_dim=64, max_position_embeddings=80, **SMALL)


def test_opt_1_3b() -> None:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
    shape = measure_shape("opt", OPTConfig(word_embed_proj_dim=2048, vocab_size=50272, **sizes))
    assert (shape.parameters, shape.blocks, shape.cache_per_token) == (1_315_758_080, 24, 2 * 24 * 2048)
    assert shape.root + 24 * shape.block == shape.parameters  # tied embeddings are counted once
    assert (shape.embedding, shape.head, shape.is_tied) == ((50272 + 2050) * 2048, 50272 * 2048, True)


def test_a_model_without_heads_has_no_cache() -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=96)
    shape = measure_shape("m", config, "eager")
    assert (shape.cache_per_token, shape.blocks) == (0, 2) and shape.parameters > 0
    with pytest.raises(ValueError, match=r"^m cannot be built: .*does not support .*scaled_dot_product_attention"):
        measure_shape("m", config, "sdpa")


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="an older transformers")
def test_different_head_sizes_use_the_most_frequent_one() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    shape = measure_shape("g", AutoConfig.for_model("gemma4_text", **sizes, **heads, **inputs))
    assert shape.cache_per_token == 2 * 3 * 2 * 8


def test_one_tensor_parallel_rank() -> None:
    """Matrices of attention and MLP and the rows of the head are halved. Norms are not."""
    config = LlamaConfig(intermediate_size=160, num_key_value_heads=2, tie_word_embeddings=False, **SMALL)
    full, half = measure_shape("llama", config), measure_shape("llama", config, tensor=2)
    split = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160  # q, o; k, v; gate, up, down
    assert full.block - half.block == split // 2
    assert full.parameters - half.parameters == (3 * split + 64 * 64) // 2
    assert (half.cache_per_token, half.vocabulary) == (full.cache_per_token // 2, 32)
    one, two = (activations(shape, Workload(), tokens=64, length=64) for shape in (full, half))
    # The inputs of norms and products, four hidden states, are not split. The rest of attention and MLP is halved.
    assert one.block / 2 < two.block < one.block
    with pytest.raises(ValueError, match="without a tensor-parallel plan"):
        measure_shape("opt", OPT, tensor=2)
    with pytest.raises(ValueError, match="tensor_parallel=4 does not divide the heads of llama: 4 query heads, 2 key"):
        measure_shape("llama", config, tensor=4)
    scorer = measure_shape("llama", config, scores=True)  # the score head has one output instead of 64 rows
    assert full.parameters - scorer.parameters == 63 * 64 and scorer.vocabulary == 0
