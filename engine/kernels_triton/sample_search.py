"""Filtered `sample` in Triton by searching thresholds, for rows whose candidates are too many to sort.

Floats compare as integers once their sign is folded, so each pass over the row, which lies in the L2 cache, halves an
interval of integers twice and cuts it to the logits that there are in it: some 9 passes a search over bf16 logits, 10
to 13 over fp32 ones (counted at 50,272 and 151,936 tokens), 16 at most. Ties are taken by index, as a stable sort
would.
"""

import triton
import triton.language as tl

from engine.kernels_triton.sample_parts import DEPTH, NOWHERE, key_of, tile_of, uniform, value_of

SCAN = 2048  # logits of a tile: half as wide as elsewhere, as their sums take registers


@triton.jit
def _weight_from(logits, vocabulary, inverse_temperature, top, low, TILE: tl.constexpr):
    """Weight and number of the tokens whose keys are at least `low`."""
    weight = tl.zeros((TILE,), dtype=tl.float32)
    count = tl.zeros((TILE,), dtype=tl.int32)
    for step in range(tl.cdiv(vocabulary, TILE)):
        z = tile_of(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        weight += tl.where(key_of(z) >= low, tl.exp(z - top), 0.0)
        count += (key_of(z) >= low).to(tl.int32)
    return tl.sum(weight, 0), tl.sum(count, 0)


@triton.jit
def _probe(logits, vocabulary, inverse_temperature, top, lo, a, b, c, hi, TILE: tl.constexpr):
    """Weight and number of the tokens whose keys are at least a, b and c, and the least and the largest key that there
    is in [lo, hi): eight scalars from one pass.
    """
    weight_a = tl.zeros((TILE,), dtype=tl.float32)
    weight_b = tl.zeros((TILE,), dtype=tl.float32)
    weight_c = tl.zeros((TILE,), dtype=tl.float32)
    count_a = tl.zeros((TILE,), dtype=tl.int32)
    count_b = tl.zeros((TILE,), dtype=tl.int32)
    count_c = tl.zeros((TILE,), dtype=tl.int32)
    least = tl.zeros((TILE,), dtype=tl.int32) + hi - 1
    largest = tl.zeros((TILE,), dtype=tl.int32) + lo
    for step in range(tl.cdiv(vocabulary, TILE)):
        z = tile_of(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        key = key_of(z)
        e = tl.exp(z - top)
        weight_a += tl.where(key >= a, e, 0.0)
        weight_b += tl.where(key >= b, e, 0.0)
        weight_c += tl.where(key >= c, e, 0.0)
        count_a += (key >= a).to(tl.int32)
        count_b += (key >= b).to(tl.int32)
        count_c += (key >= c).to(tl.int32)
        least = tl.minimum(least, tl.where(key >= lo, key, hi - 1))
        largest = tl.maximum(largest, tl.where(key < hi, key, lo))
    return (
        tl.sum(weight_a, 0),
        tl.sum(weight_b, 0),
        tl.sum(weight_c, 0),
        tl.sum(count_a, 0),
        tl.sum(count_b, 0),
        tl.sum(count_c, 0),
        tl.min(least, 0),
        tl.max(largest, 0),
    )


@triton.jit
def _search(
    logits,
    vocabulary,
    inverse_temperature,
    top,
    low,
    target,
    BY_COUNT: tl.constexpr,
    STRICT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest key k in [low, key(top)] with amount(keys >= k) at least (strictly: above) the target; `low` serves.

    Returns k, and weight and number of the tokens with larger keys. The interval [lo, hi) that k lies in is cut into
    four by each pass, and to the keys that there are in it: it ends with one token's, or that of several alike.
    """
    lo = low.to(tl.int64)
    hi = key_of(top).to(tl.int64) + 1
    weight = 0.0 * top
    count = 0 * low
    while hi - lo > 1:
        b = lo + (hi - lo) // 2
        a = lo + (b - lo) // 2
        c = b + (hi - b) // 2
        weight_a, weight_b, weight_c, count_a, count_b, count_c, least, largest = _probe(
            logits,
            vocabulary,
            inverse_temperature,
            top,
            lo.to(tl.int32),
            a.to(tl.int32),
            b.to(tl.int32),
            c.to(tl.int32),
            hi.to(tl.int32),
            TILE,
        )
        if BY_COUNT:
            in_a, in_b, in_c = count_a >= target, count_b >= target, count_c >= target
        elif STRICT:
            in_a, in_b, in_c = weight_a > target, weight_b > target, weight_c > target
        else:
            in_a, in_b, in_c = weight_a >= target, weight_b >= target, weight_c >= target
        # The first of a, b, c that misses is the new end; the amounts above it are what it missed with.
        weight = tl.where(in_c, weight, tl.where(in_b, weight_c, tl.where(in_a, weight_b, weight_a)))
        count = tl.where(in_c, count, tl.where(in_b, count_c, tl.where(in_a, count_b, count_a)))
        hi = tl.where(in_c, hi, tl.where(in_b, c, tl.where(in_a, b, a)))
        lo = tl.where(in_c, c, tl.where(in_b, b, tl.where(in_a & (a > lo), a, lo)))
        # Between two keys that there are, the amounts stay as they are.
        lo = tl.maximum(lo, least.to(tl.int64))
        hi = tl.maximum(tl.minimum(hi, largest.to(tl.int64) + 1), lo + 1)
    return lo.to(tl.int32), weight, count


@triton.jit(do_not_specialize=["state", "top_k"])
def search_kernel(
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
    settled,
    top_k,
    top_p,
    floor,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The token whose share of the cumulative sum of what the filters keep, in falling likelihood, u falls in.

    `low` is the smallest key kept and `ties` how many of its tokens are; `kept` is the weight of all that is kept.
    """
    row = tl.program_id(0)
    if tl.load(settled + row) > 0:
        return
    tile = tl.arange(0, TILES)
    stats = row * tiles + tile
    top = tl.max(tl.load(highest + stats, mask=tile < tiles, other=float("-inf")), 0)
    whole = tl.sum(tl.load(totals + stats, mask=tile < tiles, other=0.0), 0)  # NaN where the row has one
    logits += row.to(tl.int64) * stride
    low = key_of(top - DEPTH)
    kept, number = _weight_from(logits, vocabulary, inverse_temperature, top, low, TILE)
    ties = 0 * number + NOWHERE
    if HAS_TOP_K:  # noqa: SIM102  known when compiling; the other is not
        if number > top_k:
            low, weight, count = _search(logits, vocabulary, inverse_temperature, top, low, top_k, True, False, TILE)
            ties = top_k - count
            kept = weight + ties.to(tl.float32) * tl.exp(value_of(low) - top)
    if HAS_TOP_P:
        target = top_p * kept
        key, weight, count = _search(logits, vocabulary, inverse_temperature, top, low, target, False, False, TILE)
        one = tl.exp(value_of(key) - top)
        ties = tl.where(key == low, ties, NOWHERE)
        ties = tl.minimum(tl.maximum(tl.ceil((target - weight) / one), 1.0), ties.to(tl.float32)).to(tl.int32)
        low = key
        kept = weight + ties.to(tl.float32) * one
    if HAS_MIN_P:
        key = key_of(top + floor)  # floor: the logarithm of min_p
        if key > low:
            kept, _ = _weight_from(logits, vocabulary, inverse_temperature, top, key, TILE)
            low = key
            ties = 0 * number + NOWHERE
    target = uniform(state, streams, positions, row) * kept
    key, weight, _ = _search(logits, vocabulary, inverse_temperature, top, low, target, False, True, TILE)
    wanted = tl.floor((target - weight) / tl.exp(value_of(key) - top))
    wanted = tl.minimum(tl.maximum(wanted, 0.0), (tl.where(key == low, ties, NOWHERE) - 1).to(tl.float32)).to(tl.int32)
    token = 0 * key - 1
    last = 0 * key
    passed = 0 * key
    for step in range(tl.cdiv(vocabulary, TILE)):
        z = tile_of(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        places = step * TILE + tl.arange(0, TILE)
        same = ((key_of(z) == key) & (places < vocabulary)).to(tl.int32)
        rank = passed + tl.cumsum(same, 0) - 1
        token = tl.maximum(token, tl.max(tl.where((same > 0) & (rank == wanted), places, -1), 0))
        last = tl.maximum(last, tl.max(tl.where(same > 0, places, 0), 0))
        passed += tl.sum(same, 0)
    tl.store(tokens + row, tl.where(token < 0, last, token))
    tl.store(logprobs + row, value_of(key) - top - tl.log(kept) + 0.0 * whole)
