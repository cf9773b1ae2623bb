"""Rotary position embeddings of heads on CPUs, with the norm before them: `rotary.c`, and the same by operators.

RoFormer (Su et al., 2021), in the form of GPT-NeoX: number i of a head turns with number i + turned / 2.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.kernels.host.library import library, team
from engine.kernels.host.norms import MOST, Kind
from engine.kernels.ready import Ready

_ARGUMENTS: list[Any] = (
    [ctypes.c_void_p]
    + [ctypes.c_long] * 2
    + [ctypes.c_void_p, ctypes.c_float, ctypes.c_int]
    + [ctypes.c_void_p] * 3
    + [ctypes.c_long] * 4
    + [ctypes.c_int] * 2
)


def turned_by_operators(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x (..., N, size), the first numbers of its heads turned by cosines, sines (N, turned), as the models spell it."""
    turned = cosines.shape[-1]
    head, rest = x[..., :turned], x[..., turned:]
    across = torch.cat((-head[..., turned // 2 :], head[..., : turned // 2]), -1)
    return torch.cat((head * cosines + across * sines, rest), -1)


def turn_heads(
    tokens: int,
    heads: int,
    size: int,
    dtype: torch.dtype,
    *,
    turned: int,
    at: tuple[int, int, int],
    kind: Kind | None,
    eps: float,
) -> Ready:
    """A function of (x, cosines, sines (tokens, turned), weight (size,) or None) and what it writes, (tokens, heads,
    size).

    x is contiguous; the heads begin at number at[0] of it, tokens and heads at[1] and at[2] numbers apart. With a
    weight each head is normed before it turns. All is of `dtype`, fp32 or bf16.
    """
    found = library("rotary")
    assert found is not None and dtype in (torch.float32, torch.bfloat16) and turned <= size <= MOST
    function = found.turn_heads
    function.argtypes, function.restype = _ARGUMENTS, None
    written = torch.empty(tokens, heads, size, dtype=dtype)
    out, wide, how = written.data_ptr(), int(dtype == torch.float32), int(kind or 0)
    offset, token_stride, head_stride = at[0] * dtype.itemsize, at[1], at[2]

    def run(x: Tensor, cosines: Tensor, sines: Tensor, weight: Tensor | None = None) -> None:
        function(
            x.data_ptr() + offset,
            token_stride,
            head_stride,
            None if weight is None else weight.data_ptr(),
            eps,
            how,
            cosines.data_ptr(),
            sines.data_ptr(),
            out,
            tokens,
            heads,
            size,
            turned,
            wide,
            team(tokens * heads * size),
        )

    return run, [written]
