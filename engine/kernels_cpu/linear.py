"""Linear layers in bf16 on CPUs, above all for few rows: binds `linear.c`.

A product of a few rows with a large matrix takes as long as reading the matrix. Products of a thousand rows (prompts)
take a ninth longer than PyTorch's own. They are computed here all the same, because the numbers of a model would
otherwise depend on how many rows run together. Each output is one thread's fp32 sum, in an order that depends only on
the number of inputs, and is rounded once, with its bias. So the product of a row is the same bit for bit, whichever
rows are computed with it and however many threads compute.

Processors with AMX use oneDNN's packed products (`engine/generation/prepacked_linears.py`), which are faster there.
Left out: fp32, which oneDNN's packed products read as fast, and processors other than x86, where nothing was measured.
"""

import ctypes
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels_cpu.library import library

MIN_OUTPUTS = 16  # of a matrix: TILE in linear.c
_ARGUMENTS: list[Any] = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]


class Method(IntEnum):
    """How this processor multiplies: not with this kernel, widened to fp32, or bf16 in pairs (AVX512_BF16)."""

    NONE = 0
    WIDEN = 1
    PAIRS = 2


@cache
def method() -> Method:
    """Return the method of this processor; NONE also if there is no compiler."""
    compiled = library("linear", exact=True)
    return Method.NONE if compiled is None else Method(compiled.linear_method())


def serves(weight: Tensor) -> bool:
    """Return whether `LinearRows` can read this matrix (out, in) here."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and len(weight) >= MIN_OUTPUTS
        and method() != Method.NONE
    )


class LinearRows:
    """x (..., in) bf16 -> (..., out) bf16, without gradients.

    weight (out, in), contiguous, and bias (out,) or None, both bf16. Each call reads them where they are.
    Raises ValueError if x has another type or size.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        assert serves(weight) and weight.is_contiguous()
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous())
        compiled = library("linear", exact=True)
        assert compiled is not None
        self._function: Any = compiled.linear_rows
        self._function.argtypes, self._function.restype = _ARGUMENTS, None
        self._tensors = weight, bias  # keeps their memory
        self._pointers = weight.data_ptr(), None if bias is None else bias.data_ptr()
        self.outs, self.ins = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.ins:
            raise ValueError(f"x must be bf16 with rows of {self.ins} numbers, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outs)
        rows, threads = x.numel() // self.ins, torch.get_num_threads()
        self._function(*self._pointers, x.data_ptr(), y.data_ptr(), rows, self.ins, self.outs, threads)
        return y
