"""Attention of one query token per sequence over a slot cache, with grouped heads.

    o = sum_t softmax_t(scale q k_t) v_t     over max(0, n - window) <= t < n

n is the length of the sequence with the query's own token, whose key and value are in the cache. Query head h reads key
head h // (H / Hkv) (Ainslie et al., 2023, arXiv:2305.13245). The first tokens of a sequence are in a cache of prompts,
which several sequences read. Left out: biases by position (ALiBi).

`decode_attention` selects the implementation: Triton on GPUs, otherwise `reference`. On CPUs the generator calls the
kernel in C (`engine/kernels_cpu/attention.py`), which also writes the new keys and values.

Shapes: B sequences, H query heads, Hkv key heads, S slots, T capacity, D and Dv head sizes of keys and values.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels_triton.device import has_triton


class Prompts(NamedTuple):
    """The cache of prompts of one layer, and the slot of it that each sequence reads.

    keys: (Sp, Hkv, P, D). values: (Sp, Hkv, P, Dv). slots and lengths: (B,) int64; the first `lengths` tokens of a
    sequence are in this slot, and the tokens after them are at the beginning of its own slot. firsts: (B,) int64, the
    first of the neighbouring rows with the same slot, which read their slot once.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    lengths: Tensor
    firsts: Tensor


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prompts: Prompts,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return (B, H, Dv) in the query's dtype, zeros where the length is 0.

    query: (B, H, D). keys: (S, Hkv, T, D) and values: (S, Hkv, T, Dv), the cache of one layer. slots: (B,) rows of the
    cache. lengths: (B,) tokens, including those in `prompts`. window: the most tokens that a query attends to.
    `softcap` c bounds scores to c tanh(score / c) (Gemma 2). Scores and sums are fp32. No gradient. The shapes are
    not checked.
    """
    return _implementation(query)(query, keys, values, prompts, slots, lengths, scale, window, softcap)


def _implementation(query: Tensor) -> Callable[..., Tensor]:
    if query.is_cuda and has_triton():
        from engine.kernels_triton import decode_attention as in_triton

        return in_triton.decode_attention
    return reference


def reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prompts: Prompts,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `decode_attention` with torch operators."""
    groups = query.shape[1] // keys.shape[1]
    with torch.no_grad():
        longest = int(lengths.max()) if len(lengths) else 0
        k = _concatenated(prompts.keys, keys, slots, prompts, longest)
        v = _concatenated(prompts.values, values, slots, prompts, longest)
        k, v = (t.float().repeat_interleave(groups, 1) for t in (k, v))  # (B, H, T, D)
        scores = torch.einsum("bhd,bhtd->bht", query.float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(longest, device=query.device)
        distances = lengths[:, None] - 1 - positions  # (B, T)
        visible = (distances >= 0) if window is None else (distances >= 0) & (distances < window)
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        weights = torch.softmax(scores, -1).masked_fill(~visible[:, None], 0)  # a row of length 0 attends to nothing
        v = v.masked_fill(~visible[:, None, :, None], 0)  # unused memory may hold NaN
        return torch.einsum("bht,bhtd->bhd", weights, v).to(query.dtype)


def _concatenated(of_prompts: Tensor, own: Tensor, slots: Tensor, prompts: Prompts, longest: int) -> Tensor:
    """Return (B, Hkv, longest, D): the tokens of each sequence from both caches, in order."""
    both = torch.cat([of_prompts[prompts.slots], own[slots]], 2)
    positions = torch.arange(longest, device=own.device)
    offsets = positions - prompts.lengths[:, None]  # (B, longest)
    indices = torch.where(offsets < 0, positions, of_prompts.shape[2] + offsets).clamp(max=both.shape[2] - 1)
    return both.gather(2, indices[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))
