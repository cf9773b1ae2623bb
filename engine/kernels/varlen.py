"""PyTorch's variable-length attention on GPUs: attention inside each sequence of a packed row.

It is FlashAttention 2 (Dao, 2023, arXiv:2307.08691). Left out: soft caps, dropout, fp32.
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
def _varlen_attention() -> Callable[..., Tensor]:
    """Return PyTorch's variable-length attention. Query heads may share a key head without copying it.

    PyTorch 2.13 has an argument for this case, 2.11 has none.
    """
    from torch.nn.attention.varlen import varlen_attn

    kernel: Callable[..., Any] = varlen_attn
    return partial(kernel, enable_gqa=True) if "enable_gqa" in inspect.signature(kernel).parameters else kernel


def varlen_fits(query: Tensor, value: Tensor) -> bool:
    """Return whether `within_sequences` supports these heads, (..., size) on a GPU."""
    if query.dtype not in DTYPES or torch.cuda.get_device_capability(query.device) < CAPABILITY:
        return False
    return query.shape[-1] == value.shape[-1] <= LARGEST_HEAD and query.shape[-1] % 8 == 0


def within_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Return (N, heads, size) from query (N, heads, size), key and value (K, key heads, size).

    Attention is causal: the last query and the last key of a sequence are the same token. starts: the indices of the
    first query and the first key of each sequence, and the total numbers at the end, (sequences + 1,) int32 each.
    longest: the most queries and the most keys of a sequence. window: the most tokens that a query attends to.
    """
    rows = (t.contiguous() for t in (query, key, value))
    window_size = (-1 if window is None else window - 1, 0)
    return _varlen_attention()(*rows, *starts, *longest, scale=scale, window_size=window_size)
