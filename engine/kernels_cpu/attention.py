"""Attention in C for CPUs: of decoded tokens over the cache, and of the sequences of a packed row.

`SlotAttention` binds `decode_attention.c`. It uses the formula of engine/kernels/decode_attention.py, and writes the
new tokens to the cache.

`ragged_attention` binds `ragged_attention.c`, causal attention with a backward pass. Query t of a sequence sees the
keys of tokens 0 to t, at most `window` of them, itself included. All sequences of a family begin with the tokens of its
first sequence. These tokens are in the row once, and the gradients of their keys are sums over the family. One call
replaces two operators per sequence forward and two backward, and the copies that concatenate the keys of a family.
`pipeline.models.attention` has the path by PyTorch's operators.

Both take bf16 and fp32, and sum in fp32. Left out: fp16.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels_cpu.library import library

DTYPES = (torch.bfloat16, torch.float32)
_RAGGED_ARGUMENTS: list[Any] = [*[ctypes.c_void_p] * 5, *[ctypes.c_long] * 7, ctypes.c_float, *[ctypes.c_int] * 3]


class _SlotCall(ctypes.Structure):
    """`struct call` of decode_attention.c."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("query", "new_keys", "new_values", "keys", "values", "out", "prompt_keys", "prompt_values"),
                *("slots", "lengths", "prompt_slots", "prompt_lengths", "firsts"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("rows", "heads", "key_heads", "capacity", "prompt_capacity", "key_size", "value_size"),
                *("query_row", "query_head", "key_row", "key_head", "value_row", "value_head", "window"),
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("half", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def supports(dtype: torch.dtype) -> bool:
    """Return whether the kernel for decoding is compiled and supports this dtype."""
    return dtype in DTYPES and library("decode_attention") is not None


def addresses(*indices: Tensor) -> tuple[int, ...]:
    """Return the number of rows B, and the addresses of contiguous int64 tensors (B,), valid while these exist.

    The tensors are slots, lengths, prompt slots, prompt lengths and firsts.
    """
    assert all(each.is_contiguous() and each.dtype == torch.int64 for each in indices)
    return len(indices[0]), *(each.data_ptr() for each in indices)


class SlotAttention:
    """Attention over the cache of one layer. The arguments that are the same in each call are converted once."""

    def __init__(
        self,
        prompt_keys: Tensor,
        prompt_values: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """Take the cache tensors of `engine.kernels.decode_attention.decode_attention`, all contiguous.

        Raises ValueError if a cache tensor is not contiguous.
        """
        self._tensors = prompt_keys, prompt_values, keys, values  # references, so that no memory is freed
        if not all(tensor.is_contiguous() for tensor in self._tensors):
            raise ValueError("the tensors of the cache must be contiguous")
        compiled = library("decode_attention")
        assert compiled is not None
        self._function = compiled.decode_attention
        self._function.argtypes, self._function.restype = [ctypes.POINTER(_SlotCall)], ctypes.c_int
        self._dtypes = {tensor.dtype for tensor in self._tensors}
        self._value_size = values.shape[3]
        self._call = _SlotCall(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            prompt_keys=prompt_keys.data_ptr(),
            prompt_values=prompt_values.data_ptr(),
            key_heads=keys.shape[1],
            capacity=keys.shape[2],
            prompt_capacity=prompt_keys.shape[2],
            key_size=keys.shape[3],
            value_size=values.shape[3],
            window=window or 0,
            scale=scale,
            softcap=softcap or 0,
            half=keys.dtype == torch.bfloat16,
        )

    def __call__(self, query: Tensor, new_keys: Tensor, new_values: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Return (1, B, H, Dv): first write the new token of each of the B rows, then attend.

        query (1, H, B, D), new_keys (1, Hkv, B, D) and new_values (1, Hkv, B, Dv) may have any strides. rows: the
        result of `addresses`. A row's new token is the last of its `lengths`. The indices are
        not checked. Raises TypeError for mixed dtypes.
        """
        call = self._call
        if not new_keys.stride(3) == new_values.stride(3) == 1:
            new_keys, new_values = new_keys.contiguous(), new_values.contiguous()
        call.new_keys, call.new_values = new_keys.data_ptr(), new_values.data_ptr()
        _, call.key_head, call.key_row, _ = new_keys.stride()
        _, call.value_head, call.value_row, _ = new_values.stride()
        query = query if query.stride(3) == 1 else query.contiguous()
        if self._dtypes != {query.dtype}:
            raise TypeError(f"all must be bf16 or all fp32, not a query in {query.dtype} and a cache in {self._dtypes}")
        heads = query.shape[1]
        out = query.new_empty(1, rows[0], heads, self._value_size)
        call.query, call.out, call.heads = query.data_ptr(), out.data_ptr(), heads
        _, call.query_head, call.query_row, _ = query.stride()
        call.rows, call.slots, call.lengths, call.prompt_slots, call.prompt_lengths, call.firsts = rows
        call.threads = torch.get_num_threads()
        if self._function(call):
            raise MemoryError("decode_attention: no memory for its intermediate sums")
        return out


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
            (start, length, family[0][1] if index else 0, start)
            for family in members
            for index, (start, length) in enumerate(family)
        ]
        bounds = torch.tensor([0, *(len(family) for family in members)]).cumsum(0)
        return cls(torch.tensor(spans), bounds, max(length + past for _, length, past, _ in spans))

    @classmethod
    def continuing(cls, chunks: Sequence[tuple[int, int, int, int]]) -> "Families":
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

    Supports fp32 and bf16 on a CPU, the same for all three. With `Families.continuing` key and value are another row of
    tokens. The number of heads is a multiple of the number of key heads. Once differentiable.
    """
    alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape
    if query.dtype not in DTYPES or query.device.type != "cpu" or not alike or library("ragged_attention") is None:
        return None
    out: Tensor = _RaggedAttention.apply(query, key, value, families, scale, window)
    return out


class _RaggedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, families: Families, scale: float, window: int | None
    ) -> Tensor:
        query, key, value = map(_rows, (query, key, value))
        heads, tokens, size = query.shape
        out = query.new_empty(tokens, heads, size)
        lses = torch.empty(heads, tokens)
        ctx.families, ctx.scale, ctx.window = families, scale, window
        _call_ragged([query, key, value, out.transpose(0, 1)], lses, families, scale, window)
        ctx.save_for_backward(query, key, value, lses)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, lses = ctx.saved_tensors
        # In the memory order of the layers before, so that their gradient is a view.
        gradients = [tensor.new_empty(tensor.transpose(0, 1).shape).transpose(0, 1) for tensor in (query, key, value)]
        tensors = [query, key, value, _rows(upstream.transpose(0, 1)), *gradients]
        _call_ragged(tensors, lses, ctx.families, ctx.scale, ctx.window)
        return (*gradients, None, None, None)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a dense last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _call_ragged(tensors: Sequence[Tensor], lses: Tensor, families: Families, scale: float, window: int | None) -> None:
    """Run forward on query, key, value and output, or backward on query, key, value, d_output and three gradients."""
    compiled = library("ragged_attention")
    assert compiled is not None
    function = compiled.ragged_attention
    function.argtypes, function.restype = _RAGGED_ARGUMENTS, ctypes.c_int
    query, key = tensors[0], tensors[1]
    data = (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors))
    strides: list[int] = []
    for tensor in tensors:
        strides += tensor.stride()[:2]
    failed = function(
        data,
        (ctypes.c_int64 * len(strides))(*strides),
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
