"""What a forward pass keeps for backward, measured on the meta device: the model runs without numbers, and autograd
tells which tensors it would save.

Attention through `scaled_dot_product_attention` is counted as the fused kernels are: queries, keys, values, output and
one number a query; eager attention as it is, with its (T, T) weights. One block and two are run; the rest is linear.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModel, PretrainedConfig

from engine.config import Precision
from engine.memory.narrowed import narrow
from engine.memory.shapes import Shape
from engine.memory.states import SIZE
from engine.precision import TORCH_DTYPE


@dataclass(frozen=True)
class Activations:
    """Bytes that one forward keeps: outside of the blocks, in each block, and a block's input alone."""

    outside: int
    block: int
    block_input: int
    blocks: int

    def total(self, *, checkpointing: bool) -> int:
        """All of it; with checkpointing the blocks' inputs, and one block that is computed again."""
        if checkpointing:
            return self.outside + self.blocks * self.block_input + self.block
        return self.outside + self.blocks * self.block


def activations(
    shape: Shape, *, tokens: int, length: int, dtype: Precision, joins: bool = False, copied: int = 0
) -> Activations:
    """Activations of `tokens` tokens in sequences of `length` in a forward with gradients.

    Whether each has a row of its own or they all lie in one, attention goes no further than a sequence. `joins` says
    that what it puts out is joined to one row, or sent to where its tokens are, and so is there twice. Of `copied`
    tokens, beside the others, keys and values alone are kept.
    """
    one, two = (tokens * _saved(shape, count, length, dtype) // length for count in (1, 2))
    return Activations(
        outside=max(0, one - (two - one)),
        block=two
        - one
        + joins * tokens * shape.queries * SIZE[dtype]
        + copied * shape.cache_per_token // shape.blocks * SIZE[dtype],
        block_input=tokens * shape.width * SIZE[dtype],
        blocks=shape.blocks,
    )


@lru_cache(maxsize=64)
def _saved(shape: Shape, blocks: int, length: int, dtype: Precision) -> int:
    """Bytes that autograd saves of one sequence in the body of a model cut to `blocks` blocks."""
    with torch.device("meta"):
        body = AutoModel.from_config(cut(shape.config, blocks), attn_implementation=shape.attention)
        body = body.to(TORCH_DTYPE[dtype]).train()
        if shape.tensor > 1:
            narrow(body, shape.tensor, shape.plan)
        ids = torch.zeros(1, length, dtype=torch.long)
        positions = torch.arange(length)[None]
    own = {_storage(t) for t in [*body.parameters(), *body.buffers()]}
    seen: dict[int, int] = {}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            seen[_storage(tensor)] = tensor.untyped_storage().nbytes()
            kept.append(tensor)  # alive, so that no other gets its place
        return tensor

    with _shapes_only(), saved_tensors_hooks(keep, lambda tensor: tensor):
        _run(body, ids, positions)
    return sum(seen.values())


def _run(body: nn.Module, ids: Tensor, positions: Tensor) -> Any:
    # Without a mask some families make one by looking at values, which meta tensors have not. Others take no positions,
    # or (Bloom) a mask of another form only.
    rows, length = ids.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool, device="meta")
    told: list[dict[str, Tensor]] = [{"attention_mask": mask, "position_ids": positions}, {"attention_mask": mask}]
    for also in told:
        with suppress(TypeError, ValueError, RuntimeError):
            return body(input_ids=ids, use_cache=False, **also)
    return body(input_ids=ids, use_cache=False, attention_mask=torch.ones(rows, length, device="meta"))


def cut(config: PretrainedConfig, blocks: int) -> PretrainedConfig:
    """The configuration with `blocks` blocks and without dropout."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    there, text.num_hidden_layers = text.num_hidden_layers, blocks
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and "layer" in key and len(value) == there:  # a word for each block
            setattr(text, key, (value * blocks)[:blocks])
    for key, value in text.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith(("pdrop", "layerdrop"))):
            setattr(text, key, 0.0)
    return shorter


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Fused(torch.autograd.Function):
    """Attention's shapes: what the fused kernels save, and an output like the queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, length, _ = query.shape
        # Laid out by token, as the kernels write it, so that joining the heads copies nothing.
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("shapes only")


class _Grouped(torch.autograd.Function):
    """Rows times the matrix of their expert: the meta device has that in bf16 alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(len(rows), matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("shapes only")


@contextmanager
def _shapes_only() -> Iterator[None]:
    """Within the block the library's attention and its experts' products only say what they would keep."""
    functional: Any = nn.functional
    before = functional.scaled_dot_product_attention, functional.grouped_mm
    functional.scaled_dot_product_attention = lambda q, k, v, *_, **__: _Fused.apply(q, k, v)
    functional.grouped_mm = lambda rows, matrices, **_: _Grouped.apply(rows, matrices)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.grouped_mm = before
