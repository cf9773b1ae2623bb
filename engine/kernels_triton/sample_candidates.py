"""Filtered `sample` in Triton by candidates: the few tokens that can survive the filters, found and sorted.

See sample.py. All kernels take a row's tile maxima and totals, as `tile_kernel` leaves them.
"""

import triton
import triton.language as tl

from engine.kernels_triton.sample_parts import DEPTH, GROUP, NOWHERE, groups_above, key_of, uniform, value_of


def room_for(top_k: int) -> int:
    """Candidates of a row that are sorted at most."""
    return 1024 if 0 < top_k <= 256 else 4096


@triton.jit(do_not_specialize=["wanted"])
def bound_kernel(
    logits,
    highest,
    totals,
    vocabulary,
    stride,
    tiles,
    inverse_temperature,
    groups,
    bounds,
    whole_there,
    counts,
    settled,
    wanted,
    top_p,
    floor,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """A key, (B,) int32, that `wanted` groups reach, or a few more; lower ones than any token that can be kept don't
    come in. Whether it is the lowest that can be, so that nothing is missing above: (B,) int32.
    """
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    stats = row * tiles + tile
    top = tl.max(tl.load(highest + stats, mask=tile < tiles, other=float("-inf")), 0)
    whole = tl.sum(
        tl.load(totals + stats, mask=tile < tiles, other=0.0)
        * tl.exp(tl.load(highest + stats, mask=tile < tiles, other=float("-inf")) - top),
        0,
    )
    lowest = key_of(top - DEPTH)
    if not HAS_TOP_K:  # of the whole, which is known; a little room for rounding
        if HAS_TOP_P:  # all below weigh together what top-p leaves out
            share = top + tl.log((1.0 - top_p) * whole / vocabulary) - 0.01
            lowest = tl.maximum(lowest, key_of(tl.where(share == share, share, float("-inf"))))
        if HAS_MIN_P:
            lowest = tl.maximum(lowest, key_of(top + floor - 0.01))
    number = tiles * (TILE // GROUP)
    place = tl.arange(0, WIDTH)
    m = tl.load(groups + row * number + place, mask=place < number, other=float("-inf"))
    key = key_of(tl.where(m == m, m, float("-inf")))
    lo = lowest.to(tl.int64)
    hi = tl.maximum(key_of(top).to(tl.int64) + 1, lo + 1)
    count = tl.sum((key >= lowest).to(tl.int32), 0)
    while (hi - lo > 1) & (count > wanted + wanted // 4):
        middle = lo + (hi - lo) // 2
        above = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        lo = tl.where(above >= wanted, middle, lo)
        hi = tl.where(above >= wanted, hi, middle)
        count = tl.where(above >= wanted, above, count)
    tl.store(bounds + row, lo.to(tl.int32))
    tl.store(whole_there + row, (lo == lowest.to(tl.int64)).to(tl.int32))
    tl.store(counts + row, 0 * count)
    tl.store(settled + row, 0 * count)


@triton.jit
def gather_kernel(
    logits,
    highest,
    totals,
    vocabulary,
    stride,
    tiles,
    inverse_temperature,
    groups,
    candidates,
    bounds,
    whole_there,
    counts,
    settled,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tokens at or above the bound, in any order: (B, ROOM) int64, whose order is that of likelihood, ties by
    index. More than there is room for are counted only.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    low = tl.load(bounds + row)
    if key_of(tl.load(highest + row * tiles + tile)) >= low:
        z, places = groups_above(
            logits, groups, row, tile, tiles, vocabulary, stride, inverse_temperature, value_of(low), TILE
        )
        z, places = tl.reshape(z, (TILE,)), tl.reshape(places, (TILE,))
        key = key_of(z)
        chosen = ((key >= low) & (z == z) & (places < vocabulary)).to(tl.int32)
        at = tl.atomic_add(counts + row, tl.sum(chosen, 0)) + tl.cumsum(chosen, 0) - 1
        packed = (-key.to(tl.int64) << 32) | places.to(tl.int64)
        tl.store(candidates + row.to(tl.int64) * ROOM + at, packed, mask=(chosen > 0) & (at < ROOM))


@triton.jit(do_not_specialize=["state", "top_k"])
def sorted_kernel(
    logits,
    highest,
    totals,
    vocabulary,
    stride,
    tiles,
    inverse_temperature,
    streams,
    positions,
    tokens,
    logprobs,
    state,
    min_p,
    candidates,
    bounds,
    whole_there,
    counts,
    settled,
    top_k,
    top_p,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    ROOM: tl.constexpr,
    TILES: tl.constexpr,
):
    """The token, where the candidates are all that it can be: `settled` (B,) int32 says so."""
    row = tl.program_id(0)
    count = tl.load(counts + row)
    if count <= ROOM:
        tile = tl.arange(0, TILES)
        m = tl.load(highest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        top = tl.max(m, 0)
        whole = tl.sum(tl.exp(m - top) * tl.load(totals + row * tiles + tile, mask=tile < tiles, other=0.0), 0)
        place = tl.arange(0, ROOM)
        exists = place < count
        packed = tl.load(candidates + row.to(tl.int64) * ROOM + place, mask=exists, other=0x7FFFFFFFFFFFFFFF)
        packed = tl.sort(packed)
        key = (-(packed >> 32)).to(tl.int32)
        e = tl.where(exists, tl.exp(value_of(key) - top), 0.0)
        enough = tl.load(whole_there + row) > 0
        if HAS_TOP_K:
            enough = enough | (count >= top_k)
            e = tl.where(place < top_k, e, 0.0)
        if HAS_TOP_P:
            share = top_p * (tl.sum(e, 0) if HAS_TOP_K else whole)
            if not HAS_TOP_K:
                enough = enough | (tl.sum(e, 0) >= share)
            e = tl.where(tl.cumsum(e, 0) - e < share, e, 0.0)
        if HAS_MIN_P:
            e = tl.where(e < min_p, 0.0, e)
        kept = tl.sum(e, 0)
        passed = tl.cumsum(e, 0) > uniform(state, streams, positions, row) * kept
        chosen = tl.min(tl.where(passed & (e > 0), place, NOWHERE), 0)
        last = tl.max(tl.where(e > 0, place, 0), 0)
        chosen = tl.where(chosen == NOWHERE, last, chosen)
        token = tl.sum(tl.where(place == chosen, packed & 0xFFFFFFFF, 0), 0)
        z = tl.sum(tl.where((place == chosen) & exists, value_of(key), 0.0), 0)
        if enough & (count > 0):
            tl.store(tokens + row, token)
            tl.store(logprobs + row, z - top - tl.log(kept) + 0.0 * whole)
            tl.store(settled + row, 1)
