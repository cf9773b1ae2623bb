"""`engine.kernels.decode_attention` in Triton.

Memory bandwidth bounds the kernel, because one query token reads the cache of its sequence. A program computes one
sequence, one key head and one split of the keys. Keys and values are then read once for all query heads of a group,
and few long sequences fill a GPU as well as many short ones ("flash-decoding", Dao et al., 2023). The length of each
sequence is divided into the same number of splits. A second kernel joins the splits. The grid depends on shapes only,
never on lengths, so the host does not wait for the device and a CUDA graph can replay it.

The queries of a group are padded to the rows of a tensor core's tile. The rows hold the queries of several neighbouring
sequences: splits of a prompt are read once for a block of sequences that have the prompt, splits of the answers by each
sequence (Juravsky et al., 2024, arXiv:2402.05099, "Hydragen").

Left out: gradients, a paged cache, quantized keys and values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels_triton.device import dot_precision, shared_memory_and_multiprocessors

MOST_SPLITS = 64
MOST_ROWS, ENOUGH_SEQUENCES = 32, 8  # limits of a block that reads a prompt: rows of a tile, sequences
LOWEST = tl.constexpr(-1e30)  # instead of -inf, whose difference with itself is NaN
NOWHERE = tl.constexpr(2**31 - 1)  # beyond every position


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prompts: Sequence[Tensor],
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `engine.kernels.decode_attention` for tensors on a GPU. prompts: the fields of `Prompts`, in order."""
    (batch, heads, width), (_, key_heads, capacity, of_values) = query.shape, values.shape
    out = query.new_empty(batch, heads, of_values)
    if batch == 0:
        return out
    query = query if query.stride(-1) == 1 else query.contiguous()
    keys, values, prompt_keys, prompt_values = (x.contiguous() for x in (keys, values, *prompts[:2]))
    shared, processors = shared_memory_and_multiprocessors(query.device)
    options = launch_options(width, of_values, heads // key_heads, keys.dtype, shared)
    keys_a_step = options["BT"]
    blocks = triton.cdiv(batch, options["SEQUENCES"])
    prompt_splits = _splits(blocks * key_heads, prompt_keys.shape[2], keys_a_step, processors)
    splits = prompt_splits + _splits(batch * key_heads, capacity, keys_a_step, processors)
    partial = query.new_empty(batch * heads, splits, of_values, dtype=torch.float32)
    highest, totals = query.new_empty(2, batch * heads, splits, dtype=torch.float32)
    share_kernel[(batch * key_heads, splits)](
        query,
        keys,
        values,
        slots,
        lengths,
        prompt_keys,
        prompt_values,
        *prompts[2:],
        partial,
        highest,
        totals,
        batch,
        key_heads,
        heads,
        width,
        of_values,
        query.stride(0),
        query.stride(1),
        capacity,
        prompt_keys.shape[2],
        splits,
        prompt_splits,
        scale,
        window or 0,
        softcap or 0.0,
        GROUP=heads // key_heads,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=dot_precision(keys.dtype),
        **options,
    )
    join_kernel[(batch * heads,)](
        partial,
        highest,
        totals,
        out,
        splits,
        of_values,
        SPLITS=MOST_SPLITS,
        BV=options["BV"],
        num_warps=max(4, options["BV"] // 32),  # 64 registers of a thread hold its numbers
    )
    return out


def launch_options(width: int, of_values: int, group: int, dtype: torch.dtype, shared: int) -> dict[str, Any]:
    """Return the tile sizes: powers of two from 16 on, 64 keys per step, fewer with little `shared` memory.

    A tile has rows for the queries of several sequences. Tensor cores do not multiply fp32. The threads do, and larger
    tiles of fp32 or fewer warps do not fit into their registers.
    """
    heads = triton.next_power_of_2(group)
    rows = max(16, heads, min(MOST_ROWS, ENOUGH_SEQUENCES * heads))
    of_query, of_value = (max(16, triton.next_power_of_2(size)) for size in (width, of_values))
    keys, warps, stages = (16, 8, 3) if dtype == torch.float32 else (64, 4, 3)

    def needed() -> int:
        """Return the bytes of shared memory: stages - 1 tiles of keys and values, one of queries, scores and p."""
        return ((stages - 1) * keys * (of_query + of_value) + rows * (of_query + of_value + 2 * keys)) * dtype.itemsize

    while needed() > shared and keys > 16:
        keys, stages = (keys, stages - 1) if stages > 2 else (keys // 2, stages)
    return {
        "SEQUENCES": rows // group,
        "BG": rows,
        "BD": of_query,
        "BV": of_value,
        "BT": keys,
        "num_warps": warps,
        "num_stages": stages,
    }


def _splits(programs: int, capacity: int, keys_a_step: int, processors: int) -> int:
    """Return the number of splits: four programs per multiprocessor, but no split shorter than two steps."""
    return max(1, min(triton.cdiv(4 * processors, programs), triton.cdiv(capacity, 2 * keys_a_step), MOST_SPLITS // 2))


# Steps differ in these arguments, and the trial of a model has a small cache. Triton would compile the kernel again if
# a number becomes 1 or a multiple of 16, or if the address of a vector becomes a multiple of 16.
@triton.jit(
    do_not_specialize=["batch", "capacity", "prompt_capacity", "splits", "prompt_splits"],
    do_not_specialize_on_alignment=["slots", "lengths", "prompt_slots", "prompt_lengths", "firsts", "totals"],
)
def share_kernel(
    query,
    keys,
    values,
    slots,
    lengths,
    prompt_keys,
    prompt_values,
    prompt_slots,
    prompt_lengths,
    firsts,
    partial,
    highest,
    totals,
    batch,
    key_heads,
    heads,
    width,
    of_values,
    stride_qb,
    stride_qh,
    capacity,
    prompt_capacity,
    splits,
    prompt_splits,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
):
    """Write the unnormalised output (B H, splits, Dv), the maximum and the total weight (B H, splits) of one split.

    The first `prompt_splits` splits are those of the prompt; every SEQUENCES-th of the neighbouring rows computes them
    for itself and the rows after it. The other splits are those of the row's own slot.
    """
    row = tl.program_id(0) // key_heads
    key_head = tl.program_id(0) % key_heads
    split = tl.program_id(1)
    group = tl.arange(0, BG)
    rows = row + group // GROUP
    head = key_head * GROUP + group % GROUP
    # The positions that each row of the tile sees, (BG, 1).
    first = tl.load(firsts + row)
    in_prompt = split < prompt_splits
    same_prompt = tl.load(firsts + rows, mask=rows < batch, other=-1) == first
    of_block = (group < SEQUENCES * GROUP) & same_prompt & ((row - first) % SEQUENCES == 0)
    exist = tl.where(in_prompt, of_block, group < GROUP)
    length = tl.load(lengths + rows, mask=exist, other=0).to(tl.int32)[:, None]
    prompt_length = tl.load(prompt_lengths + rows, mask=exist, other=0).to(tl.int32)[:, None]
    prompt_length = tl.minimum(prompt_length, length)
    begin = 0 * length
    if HAS_WINDOW:
        begin = tl.maximum(length - window, 0)
    begin = tl.where(in_prompt, begin, tl.maximum(begin, prompt_length))
    end = tl.where(in_prompt, prompt_length, length)
    lowest = tl.min(tl.where(begin < end, begin, NOWHERE))
    beyond = tl.max(end)
    # Pointers are selected as scalars: Triton 3.9 does not load bf16 asynchronously from vectors of selected pointers.
    source_keys = tl.where(in_prompt, prompt_keys, keys)
    source_values = tl.where(in_prompt, prompt_values, values)
    start_in_prompts = (tl.load(prompt_slots + row).to(tl.int64) * key_heads + key_head) * prompt_capacity
    start_in_slots = (tl.load(slots + row).to(tl.int64) * key_heads + key_head) * capacity
    # Where position 0 is, or would be: a slot begins with the position after the prompt.
    origin = tl.where(in_prompt, start_in_prompts, start_in_slots - tl.load(prompt_lengths + row))
    shares = tl.where(in_prompt, prompt_splits, splits - prompt_splits)
    nth = tl.where(in_prompt, split, split - prompt_splits)
    share = tl.cdiv(tl.cdiv(tl.maximum(beyond - lowest, 0), shares), BT) * BT
    start = lowest + nth * share
    last = tl.minimum(start + share, beyond)

    d = tl.arange(0, BD)
    dv = tl.arange(0, BV)
    q = query + rows.to(tl.int64)[:, None] * stride_qb + head[:, None] * stride_qh + d[None, :]
    q = tl.load(q, mask=exist[:, None] & (d < width)[None, :], other=0.0).to(keys.dtype.element_ty)
    m = tl.full((BG,), LOWEST, dtype=tl.float32)
    s = tl.zeros((BG,), dtype=tl.float32)
    acc = tl.zeros((BG, BV), dtype=tl.float32)
    for step in range(tl.cdiv(tl.maximum(last - start, 0), BT)):
        positions = start + step * BT + tl.arange(0, BT)
        used = positions < last
        k_at = source_keys + (origin + positions) * width
        v_at = source_values + (origin + positions) * of_values
        k = tl.load(k_at[None, :] + d[:, None], mask=used[None, :] & (d < width)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        seen = used[None, :] & (positions[None, :] >= begin) & (positions[None, :] < end)
        scores = tl.where(seen, scores, LOWEST)
        above = tl.maximum(m, tl.max(scores, 1))
        shrink = tl.exp(m - above)
        weights = tl.where(seen, tl.exp(scores - above[:, None]), 0.0)  # a row may not have seen a key yet
        s = s * shrink + tl.sum(weights, 1)
        v = tl.load(v_at[:, None] + dv[None, :], mask=used[:, None] & (dv < of_values)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = above
    here = (rows * heads + head) * splits + split
    tl.store(highest + here, m, mask=exist)
    tl.store(totals + here, s, mask=exist)
    out = partial + here.to(tl.int64)[:, None] * of_values + dv[None, :]
    tl.store(out, acc.to(partial.dtype.element_ty), mask=exist[:, None] & (dv < of_values)[None, :])


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["totals"])
def join_kernel(partial, highest, totals, out, splits, of_values, SPLITS: tl.constexpr, BV: tl.constexpr):
    """Join the splits of one head: its output (Dv,)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dv = tl.arange(0, BV)
    exist = split < splits
    exists = dv < of_values
    m = tl.load(highest + row * splits + split, mask=exist, other=LOWEST)
    share = tl.exp(m - tl.max(m, 0))
    total = tl.sum(share * tl.load(totals + row * splits + split, mask=exist, other=0.0), 0)
    addresses = partial + (row * splits + split)[:, None] * of_values + dv[None, :]
    acc = tl.load(addresses, mask=exist[:, None] & exists[None, :], other=0.0)
    result = tl.sum(acc * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * of_values + dv, result.to(out.dtype.element_ty), mask=exists)
