"""Predicted activations of a packed row against the tensors that autograd saves on a CPU."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, LlamaConfig

from engine import EngineConfig
from engine.kernels_cpu.library import library
from engine.memory import ModelStates, Workload, measure_shape, training_bytes
from engine.parallel.sequence import sequence_shard
from pipeline.data.batch import Documents
from pipeline.models.attention import use_documents
from pipeline.models.modules import packed_inputs

LENGTH, DOCUMENTS = 32, 4
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


def saved_bytes() -> int:
    """Bytes that a forward over one packed row saves."""
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa").float().train()
    assert use_documents(model)
    documents = Documents((LENGTH,) * DOCUMENTS)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    sizes: dict[int, int] = {}
    references: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in own:
            sizes[storage] = tensor.untyped_storage().nbytes()
            references.append(tensor)
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        ids = torch.zeros(1, DOCUMENTS * LENGTH, dtype=torch.long)
        model.base_model(**packed_inputs(ids, documents, sequence_shard(DOCUMENTS * LENGTH)), use_cache=False)
    return sum(sizes.values())


def test_packed_rows() -> None:
    if library("ragged_attention") is None:
        pytest.skip("the kernel needs a C compiler")
    work = Workload(EngineConfig(dtype="fp32"), micro_batch_tokens=DOCUMENTS * LENGTH, max_length=LENGTH, is_cpu=True)
    predicted = training_bytes(measure_shape("llama", CONFIG), work, ModelStates())["activations"]
    assert predicted == pytest.approx(saved_bytes(), rel=0.02)
