"""Causal attention of the sequences of a packed row on CPUs, forward and backward: binds `ragged_attention.c`.

Query t of a sequence sees the keys of tokens 0 to t, at most `window` of them, itself included. All sequences of a
family begin with the tokens of its first sequence. These tokens are in the row once, and the gradients of their keys
are sums over the family.

One call replaces two operators per sequence forward and two backward, and the copies that concatenate the keys of a
family. It accumulates in fp32. `pipeline.models.attention` has the path by PyTorch's operators.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels_cpu.library import library

DTYPES = (torch.float32, torch.bfloat16)
_ARGUMENTS: list[Any] = [*[ctypes.c_void_p] * 5, *[ctypes.c_long] * 7, ctypes.c_float, *[ctypes.c_int] * 3]


@dataclass(frozen=True, eq=False)
class Families:
    """The sequences of a row of N tokens, and their families.

    spans: (sequences, 4) int64, ordered by family: the first token, the number of own tokens, the number of tokens of
    the family's first sequence that precede them (0 for the first sequence), and the first query
    bounds: (families + 1,) int64, where each family begins in `spans`
    longest: the number of keys that the last token of the longest sequence sees
    """

    spans: Tensor
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, members: Sequence[Sequence[tuple[int, int]]]) -> "Families":
        """Create from (start, length) of the sequences of each family, its first sequence first."""
        spans = [
            (start, length, family[0][1] if place else 0, start)
            for family in members
            for place, (start, length) in enumerate(family)
        ]
        bounds = torch.tensor([0, *(len(family) for family in members)]).cumsum(0)
        return cls(torch.tensor(spans), bounds, max(length + past for _, length, past, _ in spans))

    @classmethod
    def going_on(cls, chunks: Sequence[tuple[int, int, int, int]]) -> "Families":
        """Create from (start, past, length, queries) of sequences whose last `length` tokens have queries.

        `past` tokens precede them. Keys and values begin at `start` of their row, queries at `queries` of theirs. No
        gradients.
        """
        spans = [
            span
            for start, past, length, queries in chunks
            for span in ((start, past, 0, -1), (start + past, length, past, queries))
        ]
        longest = max(past + length for _, past, length, _ in chunks)
        return cls(torch.tensor(spans), torch.arange(0, len(spans) + 1, 2), longest)


def ragged_attention(
    query: Tensor, key: Tensor, value: Tensor, families: Families, *, scale: float, window: int | None = None
) -> Tensor | None:
    """Return (N, heads, size) from query (heads, N, size), key and value (key heads, N, size); None if unsupported.

    Supports fp32 and bf16 on a CPU, the same for all three. With `Families.going_on` key and value are another row of
    tokens. The number of heads is a multiple of the number of key heads. Once differentiable.
    """
    alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape
    if query.dtype not in DTYPES or query.device.type != "cpu" or not alike or library("ragged_attention") is None:
        return None
    out: Tensor = _Ragged.apply(query, key, value, families, scale, window)
    return out


class _Ragged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, families: Families, scale: float, window: int | None
    ) -> Tensor:
        query, key, value = map(_rows, (query, key, value))
        heads, tokens, size = query.shape
        out = query.new_empty(tokens, heads, size)
        lses = torch.empty(heads, tokens)
        ctx.families, ctx.scale, ctx.window = families, scale, window
        _call([query, key, value, out.transpose(0, 1)], lses, families, scale, window)
        ctx.save_for_backward(query, key, value, lses)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, lses = ctx.saved_tensors
        # In the memory order of the layers before, so that their gradient is a view.
        gradients = [tensor.new_empty(tensor.transpose(0, 1).shape).transpose(0, 1) for tensor in (query, key, value)]
        tensors = [query, key, value, _rows(upstream.transpose(0, 1)), *gradients]
        _call(tensors, lses, ctx.families, ctx.scale, ctx.window)
        return (*gradients, None, None, None)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a dense last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _call(tensors: Sequence[Tensor], lses: Tensor, families: Families, scale: float, window: int | None) -> None:
    """Run forward on query, key, value and output, or backward on query, key, value, d_output and three gradients."""
    found = library("ragged_attention")
    assert found is not None
    function = found.ragged_attention
    function.argtypes, function.restype = _ARGUMENTS, ctypes.c_int
    query, key = tensors[0], tensors[1]
    places = (ctypes.c_void_p * len(tensors))()
    steps = (ctypes.c_int64 * (2 * len(tensors)))()
    for number, tensor in enumerate(tensors):
        places[number] = tensor.data_ptr()
        steps[2 * number : 2 * number + 2] = list(tensor.stride()[:2])
    failed = function(
        places,
        steps,
        lses.data_ptr(),
        families.spans.data_ptr(),
        families.bounds.data_ptr(),
        len(families.bounds) - 1,
        families.longest,
        query.shape[0],
        key.shape[0],
        query.shape[1],
        query.shape[2],
        window or 0,
        scale,
        int(query.dtype == torch.float32),
        int(len(tensors) > 4),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for attention over a packed row: choose a smaller micro_batch_tokens")
