"""Norms of rows on CPUs, with the residual sums before them: `norms.c`, and what it computes by PyTorch's operators.

A kernel here is made ready for one shape: what it writes lies in tensors of its own, so a call allocates nothing, and
overwrites what the call before it gave.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.host.library import library, team
from engine.kernels.ready import Ready

MOST = 16384  # numbers of a row, as in rows.h
_ARGUMENTS: list[Any] = [ctypes.c_void_p] * 7 + [ctypes.c_long] * 2 + [ctypes.c_float] + [ctypes.c_int] * 3


class Kind(IntEnum):
    """How transformers spells a norm; `RMS` rounds before the weight, `RMS_ONE` multiplies by 1 + weight in fp32."""

    RMS = 0
    RMS_ONE = 1
    LAYER = 2


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, *, kind: Kind, eps: float) -> Tensor:
    """The norm of rows x (..., D) by PyTorch's operators, as the models spell it."""
    if kind == Kind.LAYER:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if kind == Kind.RMS else (wide * (1.0 + weight.float())).to(x.dtype)


def norm_rows(shape: Sequence[int], dtype: torch.dtype, *, parts: int, kind: Kind, eps: float) -> Ready:
    """A function of (weight (D,), bias (D,) or None, x, y, z) and what it writes, each of `shape` (..., D).

    With 2 or 3 `parts` it writes [x + y or x + y + z, rounded at each plus; its norm], with one [the norm of x].
    All are contiguous and of `dtype`, fp32 or bf16.
    """
    found = library("norms")
    assert found is not None and dtype in (torch.float32, torch.bfloat16) and shape[-1] <= MOST
    function = found.norm_rows
    function.argtypes, function.restype = _ARGUMENTS, None
    written = [torch.empty(*shape, dtype=dtype) for _ in range(2 if parts > 1 else 1)]
    rows, size, wide = written[0].numel() // shape[-1], shape[-1], int(dtype == torch.float32)
    total, out = (written[0].data_ptr() if parts > 1 else None), written[-1].data_ptr()

    def run(weight: Tensor, bias: Tensor | None, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> None:
        function(
            x.data_ptr(),
            None if y is None else y.data_ptr(),
            None if z is None else z.data_ptr(),
            total,
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out,
            rows,
            size,
            eps,
            kind,
            wide,
            team(rows * size),
        )

    return run, written
