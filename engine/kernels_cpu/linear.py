"""Linear layers in bf16 on CPUs, for few rows above all, on weights as they lie: `linear.c`.

A product of a few rows with a large matrix takes as long as the matrix takes to be read. One of a thousand, as of
prompts, takes a ninth longer than PyTorch's own; it is made here all the same, as what a model says would else depend
on how many rows run together. Each output is one thread's sum in fp32, in an order that the number of inputs alone
decides, and is rounded once, with its bias: a row's product is the same, bit for bit, whatever rows are computed with
it and on however many threads.

Processors with AMX are left to oneDNN's packed products (`engine/generation/packed.py`), which were measured there; so
are those that aren't x86, where nothing was. Left out: fp32, in which oneDNN's packed products read as fast.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels_cpu.library import library

FEWEST_OUTS = 16  # of a matrix, as in linear.c
_ARGUMENTS: list[Any] = (
    [ctypes.c_void_p, ctypes.c_int] + [ctypes.c_void_p] * 2 + [ctypes.c_long] * 2 + [ctypes.c_int] * 2
)


class Way(IntEnum):
    """How numbers are multiplied here: not at all, widened to fp32, or in bf16 by pairs (AVX512_BF16)."""

    LEAVE = 0
    WIDEN = 1
    PAIRS = 2


class _Part(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("outs", ctypes.c_long)]


@cache
def way() -> Way:
    """What this processor is good at; LEAVE where there is no compiler, too."""
    found = library("linear", exact=True)
    return Way.LEAVE if found is None else Way(found.linear_way())


def serves(weights: Sequence[Tensor]) -> bool:
    """Whether these matrices (outs, ins) can be read here by `LinearRows`."""
    alike = all(weight.dtype == torch.bfloat16 and weight.device.type == "cpu" for weight in weights)
    return alike and min(len(weight) for weight in weights) >= FEWEST_OUTS and way() != Way.LEAVE


class LinearRows:
    """x (..., ins) bf16 -> (..., sum of the outs): the products with several matrices side by side, without gradients.

    `weights` are (outs, ins), contiguous, `biases` (outs,) or None, all bf16. They are read where they lie, at each
    call; the tensors are kept alive, not copied.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        assert serves(weights) and all(weight.is_contiguous() for weight in weights)
        assert all(b is None or (b.dtype == torch.bfloat16 and b.is_contiguous()) for b in biases)
        found = library("linear", exact=True)
        assert found is not None
        self._function: Any = found.linear_rows
        self._function.argtypes, self._function.restype = _ARGUMENTS, None
        self._tensors = (*weights, *biases)
        self.ins, self.outs = weights[0].shape[1], sum(len(weight) for weight in weights)
        parts = [
            _Part(weight.data_ptr(), None if bias is None else bias.data_ptr(), len(weight))
            for weight, bias in zip(weights, biases, strict=True)
        ]
        self._parts, self._count = (_Part * len(parts))(*parts), len(parts)

    def __call__(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """The products; with `relu` nothing below zero."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.ins:
            raise ValueError(f"a product of bf16 rows of {self.ins} numbers was given {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outs)
        rows = x.numel() // self.ins
        self._function(
            self._parts, self._count, x.data_ptr(), y.data_ptr(), rows, self.ins, relu, torch.get_num_threads()
        )
        return y
