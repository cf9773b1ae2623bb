"""Linear layers in bf16 on CPUs, above all for few rows: binds `linear.c`.

A product of a few rows with a large matrix takes as long as reading the matrix. A product of a thousand rows (prompts)
takes a ninth longer than PyTorch's. This kernel computes it nevertheless: with two kernels, the numbers of a model
would depend on the number of rows in a call. One thread computes each output as an fp32 sum, in an order that depends
only on the number of inputs, and rounds it once, after adding the bias. The product of a row is therefore the same bit
for bit, whatever the other rows and the number of threads.

Processors with AMX use oneDNN's packed products (`engine/generation/prepacked_linears.py`), which are faster there.
Left out: fp32, for which oneDNN's packed products are as fast, and processors other than x86, which were not measured.
"""

import ctypes
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels_cpu.library import library

MIN_OUTPUTS = 16  # the fewest outputs of a matrix: TILE in linear.c
_ARGUMENTS: list[Any] = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]


class Method(IntEnum):
    """The method of multiplication: none (no kernel), widened to fp32, or pairs of bf16 numbers (AVX512_BF16)."""

    NONE = 0
    WIDEN = 1
    PAIRS = 2


@cache
def method() -> Method:
    """Return the method of this processor; NONE also if there is no compiler."""
    compiled = library("linear", exact=True)
    return Method.NONE if compiled is None else Method(compiled.linear_method())


def serves(weight: Tensor) -> bool:
    """Return whether `LinearRows` supports this matrix (out, in) on this machine."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and len(weight) >= MIN_OUTPUTS
        and method() != Method.NONE
    )


class LinearRows:
    """A linear layer without gradients: x (..., in) bf16 -> (..., out) bf16.

    weight: (out, in) bf16, contiguous. bias: (out,) bf16, or None. Each call reads both in place.
    Raises ValueError if x has another dtype or size.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        assert serves(weight) and weight.is_contiguous()
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous())
        compiled = library("linear", exact=True)
        assert compiled is not None
        self._function: Any = compiled.linear_rows
        self._function.argtypes, self._function.restype = _ARGUMENTS, None
        self._tensors = weight, bias  # a reference, so that the memory is not freed
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
