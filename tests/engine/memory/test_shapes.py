"""Families whose layers have no heads, or other ones each, are measured or refused in a line."""

import pytest
from transformers import CONFIG_MAPPING

from engine.memory.shapes import build_config, measured

MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 96}


def test_a_model_without_heads_keeps_no_keys() -> None:
    shape = measured("m", build_config(MAMBA), "eager")
    assert (shape.cache_per_token, shape.queries, shape.blocks) == (0, 0, 2) and shape.parameters > 0
    with pytest.raises(ValueError, match=r"^m can't be measured: it has no sdpa .*: model\.attention=eager$"):
        measured("m", build_config(MAMBA), "sdpa")


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="an older transformers")
def test_heads_of_other_sizes_in_some_layers_count_as_those_of_most() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    shape = measured("g", build_config({"model_type": "gemma4_text"} | sizes | heads | inputs))
    assert (shape.cache_per_token, shape.queries) == (2 * 3 * 2 * 8, 4 * 8)
