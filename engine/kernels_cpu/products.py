"""Products of matrices with fp32 sums on CPUs with AVX-512: `products.c`.

In fp32 they are as fast as MKL makes them on Intel's processors only (engine/kernels/wide_linear.py). Unlike oneDNN,
nothing is compiled for a shape when it first comes: rows without padding have another number of tokens each time. In
bf16, where the processor multiplies it by pairs (AVX512_BF16), the sums come out as they are; PyTorch's products round
them to bf16. Processors with AMX are left to oneDNN in bf16.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels_cpu.library import library

_WORDS = {torch.float32: 1, torch.bfloat16: 2}  # numbers of a 32 bit word


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
def takes(dtype: torch.dtype) -> bool:
    """Whether matrices of this precision can be multiplied here, and in bf16, whether nothing is faster."""
    if dtype not in _WORDS:
        return False
    found = library("products")
    ways = 0 if found is None else int(found.product_ways())
    return bool(ways & _WORDS[dtype])


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (k, n) + bias (n,) in fp32, in `out` where it is given, without gradients.

    a and b are both fp32, or both bf16 with an even k; bias and out are fp32. Raises MemoryError.
    """
    (m, k), n, words = a.shape, b.shape[1], _WORDS[a.dtype]
    assert takes(a.dtype) and a.dtype == b.dtype and len(b) == k and k % words == 0, "ask takes() first"
    out = torch.empty(m, n) if out is None else out
    assert out.shape == (m, n) and out.dtype == torch.float32 and out.stride(1) == 1
    if m == 0 or k == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    a, b = _laid_out(a, words), _laid_out(b.T, words).T
    bias = None if bias is None else bias.contiguous()
    call = _Call(
        _Matrix(a.data_ptr(), *_steps(a, words)),
        _Matrix(b.data_ptr(), *reversed(_steps(b.T, words))),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        k // words,
        words > 1,
        torch.get_num_threads(),
    )
    found: Any = library("products")
    if found.product(ctypes.byref(call)):
        raise MemoryError("a product of matrices got no memory: make micro_batch_tokens smaller")
    return out


def _laid_out(matrix: Tensor, words: int) -> Tensor:
    """A matrix (rows, k) whose numbers lie side by side along one of the two, in bf16 in whole words along k."""
    row, column = matrix.stride()
    fits = column == 1 and row % words == 0
    return matrix if fits or (words == 1 and row == 1) else matrix.contiguous()


def _steps(matrix: Tensor, words: int) -> tuple[int, int]:
    """Words between rows, and between columns, of a matrix (rows, k) that is laid out."""
    row, column = matrix.stride()
    return (row, column) if words == 1 else (row // words, 1)
