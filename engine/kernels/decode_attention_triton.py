"""`decode_attention` in Triton: the same function as in decode_attention.py, which states the formula, for GPUs.

One query token reads the whole cache and computes next to nothing: the kernel's task is to keep the memory busy. A
program owns one sequence, one key head and a share (a split) of the keys, so that keys and values are read once for
all query heads of the group, and a few long sequences fill the card as well as many short ones ("flash-decoding", Dao
et al., 2023). Shares are cut from each sequence's own length: a short row next to a long one is cut finer, not left to
one program. A second kernel joins the shares, where there are several. The grid depends on shapes alone, never on
lengths, so that nothing waits for the device and a CUDA graph can replay it.

The queries of a group are padded to the 16 rows that tensor cores take: with one head a group 15 of 16 products are
for nothing, and still memory is what is waited for.

Left out: gradients, a paged cache, quantized keys and values.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.decode_attention import check
from engine.kernels.launch import dot_precision, multiprocessors

MOST_SPLITS = 64
LOWEST = tl.constexpr(-1e30)  # stands for -inf, whose difference with itself is NaN


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `engine.kernels.decode_attention.decode_attention`."""
    check(query, keys, values, slots, lengths, window, alibi)
    (batch, heads, width), (_, key_heads, capacity, of_values) = query.shape, values.shape
    out = query.new_empty(batch, heads, of_values)
    if batch == 0:
        return out
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    options = launch_options(width, of_values, heads // key_heads, keys.dtype)
    splits = _splits(batch * key_heads, capacity, options["BT"], multiprocessors(query.device))
    partial, highest, totals = out, None, None
    if splits > 1:
        partial = query.new_empty(batch * heads, splits, of_values, dtype=torch.float32)
        highest, totals = query.new_empty(2, batch * heads, splits, dtype=torch.float32)
    share_kernel[(batch * key_heads, splits)](
        query, keys, values, slots, lengths, alibi, partial, highest, totals, key_heads, heads, width, of_values,
        query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3], splits, scale, window or 0,
        softcap or 0.0, GROUP=heads // key_heads, HAS_WINDOW=window is not None, HAS_ALIBI=alibi is not None,
        HAS_SOFTCAP=softcap is not None, WHOLE=splits == 1, PRECISION=dot_precision(keys.dtype), **options,
    )  # fmt: skip
    if splits == 1:
        return out
    join_kernel[(batch * heads,)](
        partial, highest, totals, out, splits, of_values, SPLITS=triton.next_power_of_2(splits), BV=options["BV"],
        num_warps=4,
    )  # fmt: skip
    return out


def launch_options(width: int, of_values: int, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes: powers of two over the head sizes, 16 at least (tensor cores), and 64 keys a step (fp32: 32)."""
    return {
        "BG": max(16, triton.next_power_of_2(group)), "BD": max(16, triton.next_power_of_2(width)),
        "BV": max(16, triton.next_power_of_2(of_values)), "BT": 32 if dtype == torch.float32 else 64,
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip


def _splits(programs: int, capacity: int, keys_a_step: int, processors: int) -> int:
    """Shares of the keys: four programs a multiprocessor in all, yet no share shorter than two steps."""
    return max(1, min(triton.cdiv(4 * processors, programs), triton.cdiv(capacity, 2 * keys_a_step), MOST_SPLITS))


@triton.jit
def share_kernel(
    query, keys, values, slots, lengths, alibi, partial, highest, totals, key_heads, heads, width, of_values, stride_qb,
    stride_qh, stride_ks, stride_kh, stride_kt, stride_vs, stride_vh, stride_vt, splits, scale, window, softcap,
    GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Unnormalised output (B H, splits, Dv), maximum and total weight (B H, splits) of one share of the keys; where one
    share is the WHOLE, its output.
    """
    row = tl.program_id(0) // key_heads
    key_head = tl.program_id(0) % key_heads
    split = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    slot = tl.load(slots + row).to(tl.int64)
    begin = 0 * length
    if HAS_WINDOW:
        begin = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - begin, splits), BT) * BT
    first = begin + split * share
    last = tl.minimum(first + share, length)
    keys += slot * stride_ks + key_head.to(tl.int64) * stride_kh
    values += slot * stride_vs + key_head.to(tl.int64) * stride_vh

    group = tl.arange(0, BG)
    head = key_head * GROUP + tl.minimum(group, GROUP - 1)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BV)
    q = tl.load(query + row * stride_qb + head[:, None] * stride_qh + d[None, :], mask=(d < width)[None, :], other=0.0)
    q = q.to(keys.dtype.element_ty)
    m = tl.full((BG,), LOWEST, dtype=tl.float32)
    s = tl.zeros((BG,), dtype=tl.float32)
    acc = tl.zeros((BG, BV), dtype=tl.float32)
    for step in range(tl.cdiv(tl.maximum(last - first, 0), BT)):
        places = first + step * BT + tl.arange(0, BT)
        used = places < last
        at = places.to(tl.int64)
        k = tl.load(keys + at[None, :] * stride_kt + d[:, None], mask=used[None, :] & (d < width)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        if HAS_ALIBI:
            slope = tl.load(alibi + head).to(tl.float32)
            scores += slope[:, None] * (places - length + 1).to(tl.float32)[None, :]
        scores = tl.where(used[None, :], scores, LOWEST)
        above = tl.maximum(m, tl.max(scores, 1))
        shrink = tl.exp(m - above)
        weights = tl.exp(scores - above[:, None])
        s = s * shrink + tl.sum(weights, 1)
        inside = used[:, None] & (dv < of_values)[None, :]
        v = tl.load(values + at[:, None] * stride_vt + dv[None, :], mask=inside, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = above
    exist = group < GROUP
    here = (row * heads + head) * splits + split
    if WHOLE:
        acc = acc / tl.where(s == 0.0, 1.0, s)[:, None]
    else:
        tl.store(highest + here, m, mask=exist)
        tl.store(totals + here, s, mask=exist)
    out = partial + here.to(tl.int64)[:, None] * of_values + dv[None, :]
    tl.store(out, acc.to(partial.dtype.element_ty), mask=exist[:, None] & (dv < of_values)[None, :])


@triton.jit
def join_kernel(partial, highest, totals, out, splits, of_values, SPLITS: tl.constexpr, BV: tl.constexpr):
    """One head's shares -> its output (Dv,)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dv = tl.arange(0, BV)
    exist = split < splits
    inside = dv < of_values
    m = tl.load(highest + row * splits + split, mask=exist, other=LOWEST)
    share = tl.exp(m - tl.max(m, 0))
    total = tl.sum(share * tl.load(totals + row * splits + split, mask=exist, other=0.0), 0)
    places = partial + (row * splits + split)[:, None] * of_values + dv[None, :]
    acc = tl.load(places, mask=exist[:, None] & inside[None, :], other=0.0)
    result = tl.sum(acc * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * of_values + dv, result.to(out.dtype.element_ty), mask=inside)
