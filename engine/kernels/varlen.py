"""PyTorch's attention within the sequences of a row, for GPUs (FlashAttention 2; Dao, 2023): what it takes, and a call.

Left out: soft caps, dropout, fp32.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
LARGEST_HEAD = 256


@cache
def varlen_kernel() -> Callable[..., Tensor] | None:
    """PyTorch's variable-length attention; None where there is none yet that takes a scale and a window.

    Query heads may share a key head: the kernel reads it where it lies, forward and backward. PyTorch 2.13 wants to be
    told of it, 2.11 doesn't ask.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    kernel: Callable[..., Any] = partial(varlen_attn, enable_gqa=True) if "enable_gqa" in takes else varlen_attn
    return kernel if {"scale", "window_size"} <= takes.keys() else None


def varlen_fits(query: Tensor, value: Tensor) -> bool:
    """Whether it takes heads like these, (..., size) on a GPU."""
    if query.dtype not in DTYPES or torch.cuda.get_device_capability(query.device) < CAPABILITY:
        return False
    return query.shape[-1] == value.shape[-1] <= LARGEST_HEAD and query.shape[-1] % 8 == 0


def within_sequences(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """query (N, heads, size), key and value (K, key heads, size) -> (N, heads, size), causal from each last token back.

    `starts`: where queries and keys of each sequence begin, and an end, (sequences + 1,) int32; `longest`: of either.
    """
    rows = (t.contiguous() for t in (query, key, value))
    return kernel(*rows, *starts, *longest, scale=scale, window_size=(-1 if window is None else window - 1, 0))
