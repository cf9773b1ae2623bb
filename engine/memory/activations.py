"""Bytes that a forward saves for backward, measured on the meta device: autograd reports which tensors it would save.

A body of two blocks runs. All other depths follow linearly. Fused attention saves queries, keys, values, the output and
one number a query; eager attention also saves its (T, T) weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModel
from transformers.pytorch_utils import Conv1D

from engine.config import TORCH_DTYPE, Precision
from engine.internals import fused_attention, storage_id
from engine.memory.model_shape import ModelShape
from engine.memory.states import BYTES
from engine.parallel import zero


@dataclass(frozen=True)
class Activations:
    """Bytes that one forward saves: outside of the blocks, in each of `blocks` blocks, and for a block's input."""

    outside: int
    block: int
    block_input: int
    blocks: int

    def total(self, *, checkpointing: bool) -> int:
        """Return the bytes from forward to backward; with activation checkpointing, a block's input only."""
        return self.outside + self.blocks * (self.block_input if checkpointing else self.block)


def activations(
    shape: ModelShape, *, tokens: int, length: int, dtype: Precision, has_adapters: bool = False
) -> Activations:
    """Return the activations of `tokens` tokens in sequences of `length`, padded or packed.

    `has_adapters`: only adapters of linear layers train, and save the inputs of these layers. Not counted: the small
    outputs inside adapters, keys and values that some kernels store once more for each answer to a shared prompt, and a
    second copy of attention's outputs (without a kernel for packed rows, and in sequence groups).
    """
    outside, block = (tokens * size // length for size in _saved_bytes(shape, length, dtype, has_adapters))
    return Activations(outside, block, tokens * shape.width * BYTES[dtype], shape.blocks)


@lru_cache(maxsize=64)
def _saved_bytes(shape: ModelShape, length: int, dtype: Precision, has_adapters: bool) -> tuple[int, int]:
    """Return the bytes that autograd saves on one rank for one sequence: outside of the blocks, and in one block.

    With tensor parallelism a rank holds all numbers of tensors that are as wide as hidden states, and its share of the
    others: heads, and the inner width of the MLP.
    """
    with torch.device("meta"):
        body = AutoModel.from_config(shape.config, attn_implementation=shape.attention)
        body = body.to(TORCH_DTYPE[dtype]).eval()  # without dropout
    blocks = _block_list(body)
    del blocks[2:]
    for layer in body.modules() if has_adapters else ():
        if not isinstance(layer, nn.Linear | Conv1D):
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)
    own = {storage_id(t) for t in [*body.parameters(), *body.buffers()]}
    saved: dict[int, int] = {}
    references: list[Tensor] = []  # keep the addresses of storages unique
    sums: list[int] = []  # of `saved` before and after the last block

    def save(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in own:
            ranks = 1 if tensor.shape[-1:] == (shape.width,) else shape.tensor
            saved.setdefault(storage_id(tensor), tensor.untyped_storage().nbytes() // ranks)
            references.append(tensor)
        return tensor

    blocks[-1].register_forward_pre_hook(lambda *_: sums.append(sum(saved.values())))
    blocks[-1].register_forward_hook(lambda *_: sums.append(sum(saved.values())))
    with _fused_kernels_on_meta(), saved_tensors_hooks(save, lambda tensor: tensor):
        _forward(body, length)
    block = sums[-1] - sums[-2]
    return sum(saved.values()) - len(blocks) * block, block


def _block_list(body: nn.Module) -> nn.ModuleList:
    first = zero.blocks(body)[0]
    return next(each for each in body.modules() if isinstance(each, nn.ModuleList) and first in each)


def _forward(body: nn.Module, length: int) -> Any:
    # Without a mask some families read values to make one, and meta tensors have no values. Some families take no
    # positions, and Bloom takes a mask of shape (rows, length).
    with torch.device("meta"):
        ids = torch.zeros(1, length, dtype=torch.long)
        positions = torch.arange(length)[None]
        mask, plain_mask = torch.zeros(1, 1, length, length, dtype=torch.bool), torch.ones(1, length)
    for inputs in ({"attention_mask": mask, "position_ids": positions}, {"attention_mask": mask}):
        with suppress(TypeError, ValueError, RuntimeError):
            return body(input_ids=ids, use_cache=False, **inputs)
    return body(input_ids=ids, use_cache=False, attention_mask=plain_mask)


@contextmanager
def _fused_kernels_on_meta() -> Iterator[None]:
    """Replace attention and the product of experts by operators that save the same tensors.

    The public functions choose unfused attention on the meta device, and multiply experts in bf16 only.
    """
    functional: Any = nn.functional
    before = functional.scaled_dot_product_attention, functional.grouped_mm
    functional.scaled_dot_product_attention = lambda query, key, value, *_, **__: fused_attention(query, key, value)[0]
    functional.grouped_mm = lambda rows, matrices, **_: rows @ matrices[0]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.grouped_mm = before
