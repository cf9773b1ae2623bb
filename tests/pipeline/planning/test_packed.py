"""Activations of packed rows as they are predicted, with the CPU's kernel and with one call a sequence, on one rank and
on two that share out the row.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.kernels_cpu import ragged_attention
from engine.kernels_cpu.library import library
from engine.memory import Workload
from engine.memory.activations import activations
from engine.memory.shapes import measured
from engine.parallel import dist
from engine.parallel.sequence import share_of
from pipeline.data.documents import Documents
from pipeline.models.attention import use_documents
from pipeline.models.modules import packed_inputs
from pipeline.planning import fit
from tests.ranks import run_ranks

LENGTH, MANY = 32, 4
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


def saved() -> int:
    """Bytes that a forward over one packed row, or a share of it, keeps."""
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
        model.base_model(**packed_inputs(ids, documents, share_of(MANY * LENGTH)), use_cache=False)
    return sum(sizes.values())


def shared(kernel: bool) -> tuple[int, int]:
    """The same on one of two ranks, and as it is predicted."""
    torch.set_num_threads(1)
    dist.arrange(sequence=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not kernel:
            switch_off(monkeypatch)
        joins = fit.joins(CONFIG, "fp32", sequence=2)
        half = MANY * LENGTH // 2
        found = activations(measured("llama", CONFIG), tokens=half, length=LENGTH, dtype="fp32", joins=joins)
        return found.total(checkpointing=False), saved()


def test_prompts_that_answers_share_are_copied_as_often_as_predicted() -> None:
    """Keys that a variable-length kernel is given, of pairs whose sides have their full length."""
    length, prompt, pairs = 32, 12, 3
    row = Documents((prompt, length - prompt, length - prompt) * pairs, (None, 0, 0, None, 3, 3, None, 6, 6))
    keys, tokens = row.ragged(torch.device("cpu")).keys, sum(row.lengths)
    work = Workload(micro_batch_tokens=tokens, max_length=length, prompt=prompt, sides=2, copies=True)
    assert keys is not None and work.copied_tokens == len(keys) - tokens
    one, none = (
        activations(measured("llama", CONFIG), tokens=tokens, length=length, dtype="bf16", copied=copied)
        for copied in (work.copied_tokens, 0)
    )
    assert one.block - none.block == work.copied_tokens * 2 * 64 * 2  # keys and values of 64 bf16 numbers


def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ragged_attention, fit):
        monkeypatch.setattr(module, "library", lambda name: None)


@pytest.mark.parametrize("kernel", [True, False])
def test_packed_rows(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel and library("ragged_attention") is None:
        pytest.skip("there is no compiler for the kernel")
    if not kernel:
        switch_off(monkeypatch)
    joins = fit.joins(CONFIG, "fp32")
    assert joins is not kernel
    found = activations(measured("llama", CONFIG), tokens=MANY * LENGTH, length=LENGTH, dtype="fp32", joins=joins)
    assert found.total(checkpointing=False) == pytest.approx(saved(), rel=0.02)
    for predicted, kept in run_ranks(shared, 2, kernel):
        assert predicted == pytest.approx(kept, rel=0.02)
