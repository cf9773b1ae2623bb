"""Matrix products with fp32 sums on CPUs with AVX-512: binds `products.c`.

`engine/kernels/products.py` says which products use it. fp32 products are as fast as those of MKL on Intel's
processors. bf16 products need AVX512_BF16 and return their fp32 sums; PyTorch's products round them to bf16.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels_cpu.library import library

_PER_WORD = {torch.float32: 1, torch.bfloat16: 2}  # numbers in a word of 32 bits


class _Matrix(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("column", ctypes.c_int64))


class _Call(ctypes.Structure):
    """`struct call` of the C file."""

    _fields_ = (
        ("a", _Matrix),
        ("b", _Matrix),
        ("bias", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("c_row", "m", "n", "k")),
        ("pairs", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


@cache
def supports(dtype: torch.dtype) -> bool:
    """Return whether the kernel multiplies this dtype here."""
    compiled = library("products")
    return compiled is not None and bool(int(compiled.supported_dtypes()) & _PER_WORD.get(dtype, 0))


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return a (m, k) @ b (k, n) + bias (n,) in fp32, in `out` if given, without gradients.

    a and b are both fp32, or both bf16 with an even k; bias and out are fp32. Raises MemoryError.
    """
    (m, k), n, per_word = a.shape, b.shape[1], _PER_WORD[a.dtype]
    assert supports(a.dtype) and a.dtype == b.dtype and len(b) == k and k % per_word == 0
    out = torch.empty(m, n) if out is None else out
    assert out.shape == (m, n) and out.dtype == torch.float32 and out.stride(1) == 1
    if m == 0 or k == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    a, b = _with_unit_stride(a, per_word), _with_unit_stride(b.T, per_word).T
    bias = None if bias is None else bias.contiguous()
    call = _Call(
        _Matrix(a.data_ptr(), *_strides(a, per_word)),
        _Matrix(b.data_ptr(), *reversed(_strides(b.T, per_word))),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        k // per_word,
        per_word > 1,
        torch.get_num_threads(),
    )
    compiled: Any = library("products")
    if compiled.product(ctypes.byref(call)):
        raise MemoryError("no memory for a matrix product: choose a smaller micro_batch_tokens")
    return out


def _with_unit_stride(matrix: Tensor, per_word: int) -> Tensor:
    """Return a matrix (rows, k) with stride 1 along rows or k; bf16 has full words along k."""
    row, column = matrix.stride()
    fits = column == 1 and row % per_word == 0
    return matrix if fits or (per_word == 1 and row == 1) else matrix.contiguous()


def _strides(matrix: Tensor, per_word: int) -> tuple[int, int]:
    """Return the strides of such a matrix (rows, k) in words."""
    row, column = matrix.stride()
    return (row, column) if per_word == 1 else (row // per_word, 1)
