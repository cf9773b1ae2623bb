"""Bytes that a forward saves for backward, measured on the meta device: autograd reports which tensors it would save.

Fused attention saves queries, keys, values, the output and one number a query; eager attention also saves its (T, T)
weights. A body of one block and one of two blocks run; all other depths follow linearly.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModel, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from engine.config import TORCH_DTYPE, Precision
from engine.internals import storage_id
from engine.memory.model_shape import ModelShape
from engine.memory.states import Workload

_measured: dict[tuple[Any, ...], int] = {}


@dataclass(frozen=True)
class Activations:
    """Bytes that one forward saves: outside of the blocks, and in each block."""

    outside: int
    block: int


def activations(shape: ModelShape, work: Workload, *, tokens: int, length: int) -> Activations:
    """Return the activations of `tokens` tokens on one rank in sequences of `length`, padded or packed.

    Adapters train without the linear layers, and save the inputs of these layers. Not counted: the small outputs inside
    adapters, keys and values that some kernels store once more for each answer to a shared prompt, and a second copy of
    attention's outputs (without a kernel for packed rows, and in sequence groups).
    """
    dtype, has_adapters = work.config.dtype, work.adapters > 0
    one, two = (tokens * _saved_bytes(shape, count, length, dtype, has_adapters) // length for count in (1, 2))
    return Activations(outside=max(0, 2 * one - two), block=two - one)


def with_blocks(config: PretrainedConfig, blocks: int) -> PretrainedConfig:
    """Return a copy of the configuration with `blocks` blocks."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    before, text.num_hidden_layers = text.num_hidden_layers, blocks
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and "layer" in key and len(value) == before:  # one entry for each block
            setattr(text, key, (value * blocks)[:blocks])
    return shorter


def _saved_bytes(shape: ModelShape, blocks: int, length: int, dtype: Precision, has_adapters: bool) -> int:
    """Return the bytes that autograd saves on one rank for one sequence in a body of `blocks` blocks.

    A measurement takes about 0.1 s. Models with the same body share it: policy, critic, reward model, later stages.
    With tensor parallelism a rank holds all numbers of tensors that are as wide as hidden states, and its share of the
    others: heads, and the inner width of the MLP.
    """
    key = shape.body_settings, shape.attention, shape.width, shape.tensor, blocks, length, dtype, has_adapters
    if key not in _measured:
        _measured[key] = _measure(shape, blocks, length, dtype, has_adapters)
    return _measured[key]


def _measure(shape: ModelShape, blocks: int, length: int, dtype: Precision, has_adapters: bool) -> int:
    with torch.device("meta"):
        body = AutoModel.from_config(with_blocks(shape.config, blocks), attn_implementation=shape.attention)
        body = body.to(TORCH_DTYPE[dtype]).eval()  # without dropout
    for layer in body.modules() if has_adapters else ():
        if not isinstance(layer, nn.Linear | Conv1D):
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)
    own = {storage_id(t) for t in [*body.parameters(), *body.buffers()]}
    saved: dict[int, int] = {}
    references: list[Tensor] = []  # keep the addresses of storages unique

    def save(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in own:
            ranks = 1 if tensor.shape[-1:] == (shape.width,) else shape.tensor
            saved.setdefault(storage_id(tensor), tensor.untyped_storage().nbytes() // ranks)
            references.append(tensor)
        return tensor

    with _fused_kernels_on_meta(), saved_tensors_hooks(save, lambda tensor: tensor):
        _forward(body, length)
    text = shape.config.get_text_config()
    if dtype == "fp32" or getattr(text, "attn_logit_softcapping", None) is None:
        return sum(saved.values())
    # Packed rows cap scores in fp32 (`generation.attention.attend`): 4 bytes, where eager attention saves 2.
    return sum(saved.values()) + 2 * blocks * text.num_attention_heads // shape.tensor * length**2


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


class _FusedAttention(torch.autograd.Function):
    """Save what the fused kernels save, and return an output like the queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, length, _ = query.shape
        # The kernels write the output token by token, so that concatenating the heads copies nothing.
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("the meta device runs no backward")


@contextmanager
def _fused_kernels_on_meta() -> Iterator[None]:
    """Replace attention and the grouped product of experts by operations that save the same tensors.

    The meta device has no fused attention, and supports the grouped product for bf16 only.
    """
    functional: Any = nn.functional
    before = functional.scaled_dot_product_attention, functional.grouped_mm
    functional.scaled_dot_product_attention = lambda query, key, value, *_, **__: _FusedAttention.apply(
        query, key, value
    )
    functional.grouped_mm = lambda rows, matrices, **_: rows @ matrices[0]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.grouped_mm = before
