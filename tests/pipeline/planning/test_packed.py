"""Predicted activations of a packed row against the tensors that autograd saves under the CPU's attention kernel."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.kernels_cpu.library import library
from engine.memory import activations, measure_shape
from engine.parallel.sequence import sequence_shard
from pipeline.data.documents import Documents
from pipeline.models.attention import use_documents
from pipeline.models.modules import packed_inputs

LENGTH, MANY = 32, 4
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


def saved() -> int:
    """Bytes that a forward over one packed row saves."""
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa").float().train()
    assert use_documents(model)
    documents = Documents((LENGTH,) * MANY)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            sizes[place] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.zeros(1, MANY * LENGTH, dtype=torch.long)
        model.base_model(**packed_inputs(ids, documents, sequence_shard(MANY * LENGTH)), use_cache=False)
    return sum(sizes.values())


def test_packed_rows() -> None:
    if library("ragged_attention") is None:
        pytest.skip("there is no compiler for the kernel")
    found = activations(measure_shape("llama", CONFIG), tokens=MANY * LENGTH, length=LENGTH, dtype="fp32")
    assert found.total(checkpointing=False) == pytest.approx(saved(), rel=0.02)
