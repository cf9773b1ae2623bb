"""`decode_attention` in C: the same function as in engine/kernels/decode_attention.py, which states the formula, for
CPUs; and the same with what attention over a slot cache does around it, in one call.

bf16 and fp32; sums are fp32. Left out: fp16.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.kernels.decode_attention import Prompts, check
from engine.kernels.decode_attention import decode_attention as plain
from engine.kernels_cpu.library import library

DTYPES = (torch.bfloat16, torch.float32)


class _Call(ctypes.Structure):
    """`struct call` of the C file."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "query",
                "new_keys",
                "new_values",
                "keys",
                "values",
                "out",
                "slots",
                "lengths",
                "families",
                "alibi",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "tokens",
                "rows",
                "heads",
                "key_heads",
                "capacity",
                "key_size",
                "value_size",
                "query_row",
                "query_head",
                "key_row",
                "key_head",
                "value_row",
                "value_head",
                "window",
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("half", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


@cache
def available() -> bool:
    """Whether the kernel is here."""
    found = library("decode_attention")
    if found is not None:
        found.decode_attention.argtypes, found.decode_attention.restype = [ctypes.POINTER(_Call)], ctypes.c_int
    return found is not None


def serves(dtype: torch.dtype) -> bool:
    """Whether the kernel is here, and takes numbers of this type."""
    return dtype in DTYPES and available()


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
    prompts: Prompts | None = None,
) -> Tensor:
    """As `engine.kernels.decode_attention.decode_attention`, which serves `prompts`: only steps written for GPUs keep
    them apart. Raises IndexError where slots or lengths point outside the cache.
    """
    if prompts is not None:
        return plain(query, keys, values, slots, lengths, scale, window, alibi, softcap, prompts)
    check(query, keys, values, slots, lengths, window, alibi)
    _same_kind(query, keys, values)
    slots, lengths = slots.long().contiguous(), lengths.long().contiguous()
    for name, numbers, size in (("slots", slots, keys.shape[0] - 1), ("lengths", lengths, keys.shape[2])):
        if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) <= size):
            raise IndexError(f"{name} must be from 0 to {size}, not {numbers.tolist()}")
    keys, values, query = keys.contiguous(), values.contiguous(), _dense(query)
    alibi = None if alibi is None else alibi.float().contiguous()
    rows, heads = query.shape[:2]
    out = query.new_empty(rows, heads, values.shape[3])
    _run(
        _Call(
            query.data_ptr(),
            None,
            None,
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            slots.data_ptr(),
            lengths.data_ptr(),
            None,
            None if alibi is None else alibi.data_ptr(),
            rows,
            rows,
            heads,
            keys.shape[1],
            keys.shape[2],
            keys.shape[3],
            values.shape[3],
            *query.stride()[:2],
            0,
            0,
            0,
            0,
            window or 0,
            scale,
            softcap or 0,
            query.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out


def write_and_attend(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    rows: int,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    families: Tensor | None = None,
) -> None:
    """Write the keys and values of N tokens into a slot cache, and attend for the first `rows` of them.

    query: (1, heads, >= rows, D); new_keys, new_values: (1, Hkv, >= N, D) and (1, Hkv, >= N, Dv), of any strides, as
    models hand them over; keys, values: (S, Hkv, T, D) and (S, Hkv, T, Dv); slots, lengths: (N,) int64, each token's
    slot and the sequence's tokens up to it; out: (1, >= rows, heads, Dv), of which `rows` are written.
    families: (rows, 2) int64: the first of the neighbouring rows whose sequences begin alike (the row itself where
    there is none) and how many tokens of that each of their slots has, 0 for none; the window must reach over them.
    Slots and lengths are not checked against the cache.
    """
    _same_kind(query, new_keys, new_values, keys, values, out)
    if not (keys.is_contiguous() and values.is_contiguous() and slots.is_contiguous() and lengths.is_contiguous()):
        raise ValueError("keys, values, slots and lengths must be contiguous")
    query, new_keys, new_values = _dense(query), _dense(new_keys), _dense(new_values)
    _, heads, _, size = query.shape
    _, query_head, query_row, _ = query.stride()
    _, key_head, key_row, _ = new_keys.stride()
    _, value_head, value_row, _ = new_values.stride()
    _, key_heads, capacity, of_values = values.shape
    _run(
        _Call(
            query.data_ptr(),
            new_keys.data_ptr(),
            new_values.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            slots.data_ptr(),
            lengths.data_ptr(),
            None if families is None else families.data_ptr(),
            None,
            len(slots),
            rows,
            heads,
            key_heads,
            capacity,
            size,
            of_values,
            query_row,
            query_head,
            key_row,
            key_head,
            value_row,
            value_head,
            window or 0,
            scale,
            softcap or 0,
            query.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
    )


def _run(call: _Call) -> None:
    assert available(), "ask available() first"
    found = library("decode_attention")
    if found is not None and found.decode_attention(call):
        raise MemoryError("decode_attention: no memory for its intermediate sums")


def _same_kind(first: Tensor, *others: Tensor) -> None:
    if first.dtype not in DTYPES or any(other.dtype != first.dtype for other in others):
        raise TypeError(f"all must be bf16 or all fp32, not {[str(t.dtype) for t in (first, *others)]}")


def _dense(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 or states.shape[-1] == 1 else states.contiguous()
