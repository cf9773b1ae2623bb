"""Predicted activations of a packed row against the tensors that autograd saves on a CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig

from engine import EngineConfig
from engine.config import TORCH_DTYPE, Precision
from engine.kernels_cpu.library import library
from engine.memory import ModelStates, Workload, measure_shape, training_bytes
from engine.memory.activations import activations
from engine.parallel.sequence import sequence_shard
from pipeline.data.batch import Documents
from pipeline.models.attention import use_documents
from pipeline.models.modules import packed_inputs
from tests.engine.memory.test_activations import saved_bytes

LENGTH, DOCUMENTS = 32, 4
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


def measured_bytes(config: PretrainedConfig, documents: Documents, attention: str, dtype: torch.dtype) -> int:
    """Return the bytes that autograd saves in a forward over one packed row."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()
    assert use_documents(model)
    tokens = sum(documents.lengths)
    inputs = packed_inputs(torch.zeros(1, tokens, dtype=torch.long), documents, sequence_shard(tokens))
    return saved_bytes(model, lambda: model.base_model(**inputs, use_cache=False))


def test_packed_rows() -> None:
    if library("ragged_attention") is None:
        pytest.skip("the kernel needs a C compiler")
    work = Workload(EngineConfig(dtype="fp32"), micro_batch_tokens=DOCUMENTS * LENGTH, max_length=LENGTH, is_cpu=True)
    predicted = training_bytes(measure_shape("llama", CONFIG), work, ModelStates())["activations"]
    documents = Documents((LENGTH,) * DOCUMENTS)
    assert predicted == pytest.approx(measured_bytes(CONFIG, documents, "sdpa", torch.float32), rel=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_capped_scores(dtype: Precision) -> None:
    """A rank also saves a mask of one byte for each pair of tokens, which is not predicted."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, head_dim=8, max_position_embeddings=256, sliding_window=256,
    )  # fmt: skip
    work = Workload(EngineConfig(dtype=dtype))
    predicted = activations(measure_shape("gemma2", config, "eager"), work, tokens=256, length=256)
    actual = measured_bytes(config, Documents((256,)), "eager", TORCH_DTYPE[dtype])
    assert predicted.outside + 2 * predicted.block == pytest.approx(actual, rel=0.05)
