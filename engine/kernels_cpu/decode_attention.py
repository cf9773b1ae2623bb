"""`decode_attention` in C for CPUs, by the formula of engine/kernels/decode_attention.py, and the write of new tokens.

Takes bf16 and fp32; sums are fp32. Left out: fp16.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.kernels_cpu.library import library

DTYPES = (torch.bfloat16, torch.float32)


class _Call(ctypes.Structure):
    """`struct call` of the C file."""

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
        assert available() and compiled is not None
        self._function = compiled.decode_attention
        self._dtypes = {tensor.dtype for tensor in self._tensors}
        self._value_size = values.shape[3]
        self._call = _Call(
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

        query (1, H, N, D), new_keys (1, Hkv, N, D) and new_values (1, Hkv, N, Dv) begin with the B rows and may have
        any strides. rows: the result of `addresses`. A row's new token is the last of its `lengths`. The indices are
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
