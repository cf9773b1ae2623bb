"""`decode_attention` in C for CPUs; engine/kernels/decode_attention.py states the formula.

`write_and_attend` also writes the new keys and values. Takes bf16 and fp32; sums are fp32. Left out: fp16.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.kernels.decode_attention import Prompts, check
from engine.kernels_cpu.library import library

DTYPES = (torch.bfloat16, torch.float32)


class _Call(ctypes.Structure):
    """`struct call` of the C file."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("query", "new_keys", "new_values", "keys", "values", "out", "prompt_keys", "prompt_values"),
                *("slots", "lengths", "prompt_slots", "prompt_lengths", "firsts", "alibi"),
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


@cache
def available() -> bool:
    """Return whether the kernel is compiled."""
    found = library("decode_attention")
    if found is not None:
        found.decode_attention.argtypes, found.decode_attention.restype = [ctypes.POINTER(_Call)], ctypes.c_int
    return found is not None


def serves(dtype: torch.dtype) -> bool:
    """Return whether the kernel is compiled and supports this dtype."""
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
    """Same as `engine.kernels.decode_attention.decode_attention`.

    Raises IndexError if slots or lengths point outside the cache.
    """
    check(query, keys, values, slots, lengths, window, alibi, prompts)
    slots, lengths = slots.long().contiguous(), lengths.long().contiguous()
    tokens = keys.shape[2] + (0 if prompts is None else prompts.keys.shape[2])
    for name, numbers, size in (("slots", slots, keys.shape[0] - 1), ("lengths", lengths, tokens)):
        if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) <= size):
            raise IndexError(f"{name} must be from 0 to {size}, not {numbers.tolist()}")
    keys, values = keys.contiguous(), values.contiguous()
    alibi = None if alibi is None else alibi.float().contiguous()
    return _attend(query, None, keys, values, slots, lengths, scale, window, alibi, softcap, prompts)


def write_and_attend(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    prompts: Prompts | None = None,
) -> Tensor:
    """Write one new key and value per row into a slot cache, then attend: `decode_attention` with a write before it.

    query (B, H, D), new_keys (B, Hkv, D) and new_values (B, Hkv, Dv) may have any strides. A row's new token is the
    last of its `lengths`. The cache and the index tensors must be contiguous; the indices are not checked.
    Returns (B, H, Dv). Raises ValueError if a cache tensor is not contiguous.
    """
    cached = [keys, values, slots, lengths, *(prompts or ())]
    if not all(tensor.is_contiguous() for tensor in cached if tensor is not None):
        raise ValueError("keys, values, slots, lengths and prompts must be contiguous")
    return _attend(query, (new_keys, new_values), keys, values, slots, lengths, scale, window, None, softcap, prompts)


def _attend(
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    alibi: Tensor | None,
    softcap: float | None,
    prompts: Prompts | None,
) -> Tensor:
    query = _dense(query)
    new_keys, new_values = (None, None) if new is None else (_dense(new[0]), _dense(new[1]))
    of_prompts = [] if prompts is None else [prompts.keys.contiguous(), prompts.values.contiguous()]
    _same_kind(query, keys, values, *(t for t in (new_keys, new_values, *of_prompts) if t is not None))
    prompt_keys, prompt_values = of_prompts or (None, None)
    rows, heads, size = query.shape
    _, key_heads, capacity, value_size = values.shape
    out = query.new_empty(rows, heads, value_size)
    indices = (None, None, None) if prompts is None else (prompts.slots, prompts.lengths, prompts.firsts)
    _run(
        _Call(
            *(_pointer(t) for t in (query, new_keys, new_values, keys, values, out, prompt_keys, prompt_values)),
            *(_pointer(t) for t in (slots, lengths, *indices, alibi)),
            rows,
            heads,
            key_heads,
            capacity,
            0 if prompt_keys is None else prompt_keys.shape[2],
            size,
            value_size,
            *query.stride()[:2],
            *(new_keys.stride()[:2] if new_keys is not None else (0, 0)),
            *(new_values.stride()[:2] if new_values is not None else (0, 0)),
            window or 0,
            scale,
            softcap or 0,
            query.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _run(call: _Call) -> None:
    assert available()
    found = library("decode_attention")
    if found is not None and found.decode_attention(call):
        raise MemoryError("decode_attention: no memory for its intermediate sums")


def _same_kind(first: Tensor, *others: Tensor) -> None:
    if first.dtype not in DTYPES or any(other.dtype != first.dtype for other in others):
        raise TypeError(f"all must be bf16 or all fp32, not {[str(t.dtype) for t in (first, *others)]}")


def _dense(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 or states.shape[-1] == 1 else states.contiguous()
