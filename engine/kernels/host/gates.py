"""Activations on CPUs, and their products with what they gate: `gates.c`, and the same by PyTorch's operators."""

import ctypes
import math
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.host.library import library, team
from engine.kernels.ready import Ready

_ARGUMENTS: list[Any] = (
    [ctypes.c_void_p, ctypes.c_long] * 2 + [ctypes.c_void_p] + [ctypes.c_long] * 2 + [ctypes.c_int] * 3
)


class Kind(IntEnum):
    """`GELU_NEW` is `GELU_TANH` by single operators, each of which rounds, as GPT-2 and Phi spell it."""

    SILU = 0
    GELU_TANH = 1
    GELU_NEW = 2


def activated(x: Tensor, kind: Kind) -> Tensor:
    """The activation by PyTorch's operators, as the models spell it."""
    if kind == Kind.SILU:
        return functional.silu(x)
    if kind == Kind.GELU_TANH:
        return functional.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gate_rows(
    rows: int, size: int, dtype: torch.dtype, *, kind: Kind, gate: tuple[int, int], up: tuple[int, int] | None
) -> Ready:
    """A function of (x, y or None) and what it writes, (rows, size): activation of x's rows, times those of y.

    x and y are contiguous; their rows begin at number gate[0] and up[0] and are gate[1] and up[1] numbers apart. All is
    of `dtype`, fp32 or bf16.
    """
    found = library("gates")
    assert found is not None and dtype in (torch.float32, torch.bfloat16)
    function = found.gate_rows
    function.argtypes, function.restype = _ARGUMENTS, None
    written = torch.empty(rows, size, dtype=dtype)
    out, wide = written.data_ptr(), int(dtype == torch.float32)
    (first, stride), (second, other) = gate, up or (0, 0)
    first, second = first * dtype.itemsize, second * dtype.itemsize

    def run(x: Tensor, y: Tensor | None = None) -> None:
        function(
            x.data_ptr() + first,
            stride,
            None if y is None else y.data_ptr() + second,
            other,
            out,
            rows,
            size,
            kind,
            wide,
            team(4 * rows * size),
        )

    return run, [written]
