"""`sample` in Triton: the same function as in sample.py, for GPUs, without sorting the vocabulary.

A first kernel walks the logits, tiles of the vocabulary side by side: maximum and total weight of each tile. Unfiltered
rows then need one tile more: the totals say in which one the cumulative sum passes u. The logits are read once and a
tile; nothing as wide as the vocabulary is written.

Filtered rows are drawn from likelihood order. The first kernel then keeps the highest logit of every 32, too; from
these alone a second one finds a logit that what survives lies above: as many groups have one above it as top-k wants
tokens, or as hold a good thousand of them for top-p. A third gathers those tokens, and reads of the row only the groups
that have one. A fourth sorts the few: count and weight along the order say the rest, and whether the few were enough.

Rows where they were not (flat ones under top-p: thousands of tokens make up its share) fall to a fifth kernel, which
does nothing for the others. It searches: floats compare as integers once their sign is folded, so each pass over the
row, which lies in the L2 cache, halves an interval of integers twice and cuts it to the logits that there are in it:
some 9 passes a search over bf16 logits, 10 to 13 over fp32 ones (counted at 50,272 and 151,936 tokens), 16 at most.
Ties are taken by index, as a stable sort would.

Sums run in another order than the torch path's, so that a token may differ where u falls within rounding, about 1e-6,
of the border between two.
"""

from math import log
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sample import check
from engine.rollout.sampling import Sampling

TILE = 4096
GROUP = tl.constexpr(32)  # neighbouring logits of which the highest is kept
SCAN = 2048  # of the passes that search: half as wide, as their sums take registers
# Weights of e^-104 and less are 0 in fp32; log-probabilities of tokens so unlikely never matter.
DEPTH = tl.constexpr(104.0)
NOWHERE = tl.constexpr(2**30)
SIZE = 2**64


def sample(logits: Tensor, streams: Tensor, positions: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """As `engine.kernels.sample.sample`."""
    check(logits, streams, positions)
    batch, vocabulary = logits.shape
    tokens, logprobs = streams.new_empty(batch), logits.new_empty(batch, dtype=torch.float32)
    if batch == 0:
        return tokens, logprobs
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    greedy = how.temperature == 0
    top_k = how.top_k if how.top_k < vocabulary else 0
    filtered = not greedy and (how.top_k > 0 or how.top_p < 1)
    min_p = 0.0 if greedy else how.min_p
    tiles = triton.cdiv(vocabulary, TILE)
    stats = logits.new_empty(2, batch, tiles, dtype=torch.float32)
    row = (logits, stats[0], stats[1], vocabulary, logits.stride(0), tiles, 1.0 if greedy else 1.0 / how.temperature)
    constants: Any = {"TILE": TILE, "TILES": triton.next_power_of_2(tiles)}
    out = (streams, positions, tokens, logprobs, _state(how.seed), min_p)
    grouped = filtered or min_p > 0
    groups = stats.new_empty(batch, tiles * TILE // GROUP.value if grouped else 0)
    tile_kernel[(batch, tiles)](*row, groups, GROUPED=grouped, TILE=TILE, num_warps=8)
    if filtered:
        kinds = {"HAS_TOP_K": top_k > 0, "HAS_TOP_P": how.top_p < 1, "HAS_MIN_P": min_p > 0}
        floor = log(min_p) if min_p > 0 else 0.0
        room = room_for(top_k)
        wanted = top_k or max(1, min(room // 2, 3 * triton.cdiv(vocabulary, GROUP.value) // 4))
        candidates = streams.new_empty(batch, room)
        found = streams.new_empty(4, batch, dtype=torch.int32)
        few = (candidates, found[0], found[1], found[2], found[3])
        width = triton.next_power_of_2(groups.shape[1])
        bound_kernel[(batch,)](
            *row, groups, *few[1:], wanted, how.top_p, floor, **kinds, WIDTH=width, **constants, num_warps=8
        )
        gather_kernel[(batch, tiles)](*row, groups, *few, ROOM=room, TILE=TILE, num_warps=8)
        sorted_kernel[(batch,)](
            *row, *out, *few, top_k, how.top_p, **kinds, ROOM=room, TILES=constants["TILES"], num_warps=8
        )
        constants["TILE"] = SCAN
        filtered_kernel[(batch,)](*row, *out, found[3], top_k, how.top_p, floor, **kinds, **constants, num_warps=16)
    else:
        if min_p > 0:
            keep_kernel[(batch, tiles)](*row, groups, min_p, **constants, num_warps=8)
        draw_kernel[(batch,)](*row, *out, GREEDY=greedy, **constants, num_warps=8)
    return tokens, logprobs


def room_for(top_k: int) -> int:
    """Candidates of a row that are sorted at most."""
    return 1024 if 0 < top_k <= 256 else 4096


def _state(seed: int) -> int:
    """The generator's state before a stream is added, an int64: splitmix64 of the seed."""
    state = _mix(seed % SIZE)
    return state - SIZE if state >= SIZE // 2 else state


def _mix(x: int) -> int:
    """splitmix64, as in engine.rollout.sampling: of a number in [0, 2^64)."""
    x = (x + 0x9E3779B97F4A7C15) % SIZE
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % SIZE
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % SIZE
    return x ^ (x >> 31)


@triton.jit
def _mixed(x):
    """splitmix64 of uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(state, streams, positions, row):
    """The row's number in [0, 1) fp32."""
    stream = tl.load(streams + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    bits = _mixed(_mixed(stream + state.to(tl.uint64)) + position)
    return (bits >> 40).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _tile(logits, start, vocabulary, inverse_temperature, TILE: tl.constexpr):
    """z (TILE,) fp32 of a row from `start` on, -inf beyond the vocabulary."""
    places = start + tl.arange(0, TILE)
    z = tl.load(logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
    return z * inverse_temperature


@triton.jit
def tile_kernel(
    logits, highest, totals, vocabulary, stride, tiles, inverse_temperature, groups, GROUPED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Maximum and sum e^(z - maximum) of a tile of a row: (B, tiles) fp32 each. Maxima of its groups, where asked for:
    (B, tiles TILE / GROUP).
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    z = _tile(logits + row.to(tl.int64) * stride, tile * TILE, vocabulary, inverse_temperature, TILE)
    m = tl.max(z, 0)
    base = tl.where(m == float("-inf"), 0.0, m)  # a tile of nothing has weight 0, not NaN
    tl.store(highest + row * tiles + tile, m)
    tl.store(totals + row * tiles + tile, tl.sum(tl.exp(z - base), 0))
    if GROUPED:
        first = (row * tiles + tile) * (TILE // GROUP)
        of_groups = tl.max(tl.reshape(z, (TILE // GROUP, GROUP)), 1)
        tl.store(groups + first + tl.arange(0, TILE // GROUP), of_groups)


@triton.jit
def _groups_above(
    logits, groups, row, tile, tiles, vocabulary, stride, inverse_temperature, bound, TILE: tl.constexpr,
):  # fmt: skip
    """z (TILE / GROUP, GROUP) of a tile, -inf in groups that have none at or above `bound`, which are not read; and the
    places of these in the vocabulary.
    """
    group = tl.arange(0, TILE // GROUP)
    kept = tl.load(groups + (row * tiles + tile) * (TILE // GROUP) + group) >= bound
    places = tile * TILE + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    read = kept[:, None] & (places < vocabulary)
    z = tl.load(logits + row.to(tl.int64) * stride + places, mask=read, other=float("-inf")).to(tl.float32)
    return z * inverse_temperature, places


@triton.jit
def keep_kernel(
    logits, highest, totals, vocabulary, stride, tiles, inverse_temperature, groups, min_p, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The totals of tile_kernel without the tokens below `min_p` times the row's likeliest, unknown until then."""
    row = tl.program_id(0)
    here = row * tiles + tl.program_id(1)
    tile = tl.arange(0, TILES)
    top = tl.max(tl.load(highest + row * tiles + tile, mask=tile < tiles, other=float("-inf")), 0)
    bound = top + tl.log(min_p) - 0.01  # a little room for rounding
    z, _ = _groups_above(
        logits, groups, row, tl.program_id(1), tiles, vocabulary, stride, inverse_temperature, bound, TILE
    )
    m = tl.load(highest + here)
    base = tl.where(m == float("-inf"), 0.0, m)
    kept = tl.sum(tl.sum(tl.where(tl.exp(z - top) < min_p, 0.0, tl.exp(z - base)), 1), 0)
    tl.store(totals + here, kept + 0.0 * tl.load(totals + here))  # NaN stays


@triton.jit(do_not_specialize=["state"])
def draw_kernel(
    logits, highest, totals, vocabulary, stride, tiles, inverse_temperature, streams, positions, tokens, logprobs,
    state, min_p, GREEDY: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The token whose share of the cumulative sum, in the order of the vocabulary, u falls in; or the likeliest."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    m = tl.load(highest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    top = tl.max(m, 0)
    weights = tl.exp(m - top) * tl.load(totals + row * tiles + tile, mask=tile < tiles, other=0.0)
    sums = tl.cumsum(weights, 0)
    total = tl.max(sums, 0)
    if GREEDY:
        chosen = tl.min(tl.where(m == top, tile, NOWHERE), 0)
        target = total
        before = total
    else:
        target = _uniform(state, streams, positions, row) * total
        chosen = tl.min(tl.where((sums > target) & (weights > 0), tile, NOWHERE), 0)
        last = tl.max(tl.where(weights > 0, tile, 0), 0)
        chosen = tl.where(chosen == NOWHERE, last, chosen)
        before = tl.max(tl.where(tile < chosen, sums, 0.0), 0)
    chosen = tl.minimum(chosen, tiles - 1)
    z = _tile(logits + row.to(tl.int64) * stride, chosen * TILE, vocabulary, inverse_temperature, TILE)
    place = tl.arange(0, TILE)
    if GREEDY:
        found = tl.min(tl.where(z == top, place, NOWHERE), 0)
        last = 0 * found
    else:
        e = tl.exp(z - top)
        e = tl.where(e < min_p, 0.0, e)
        found = tl.min(tl.where((before + tl.cumsum(e, 0) > target) & (e > 0), place, NOWHERE), 0)
        last = tl.max(tl.where(e > 0, place, 0), 0)
    found = tl.where(found == NOWHERE, last, found)  # the last bit of a sum: the last token with a weight
    tl.store(tokens + row, chosen * TILE + found)
    # A NaN anywhere in the row is in the total.
    of_token = tl.sum(tl.where(place == found, z, 0.0), 0)
    tl.store(logprobs + row, of_token - top - tl.log(tl.sum(weights, 0)))


@triton.jit
def _key(z):
    """int32 in the order of fp32 `z`; both zeros are one."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The fp32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight_from(logits, vocabulary, inverse_temperature, top, low, TILE: tl.constexpr):
    """Weight and number of the tokens whose keys are at least `low`."""
    weight = tl.zeros((TILE,), dtype=tl.float32)
    count = tl.zeros((TILE,), dtype=tl.int32)
    for step in range(tl.cdiv(vocabulary, TILE)):
        z = _tile(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        weight += tl.where(_key(z) >= low, tl.exp(z - top), 0.0)
        count += (_key(z) >= low).to(tl.int32)
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
        z = _tile(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        key = _key(z)
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
        tl.sum(weight_a, 0), tl.sum(weight_b, 0), tl.sum(weight_c, 0),
        tl.sum(count_a, 0), tl.sum(count_b, 0), tl.sum(count_c, 0), tl.min(least, 0), tl.max(largest, 0),
    )  # fmt: skip


@triton.jit
def _search(
    logits, vocabulary, inverse_temperature, top, low, target, BY_COUNT: tl.constexpr, STRICT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The largest key k in [low, key(top)] with amount(keys >= k) at least (strictly: above) the target; `low` serves.

    Returns k, and weight and number of the tokens with larger keys. The interval [lo, hi) that k lies in is cut into
    four by each pass, and to the keys that there are in it: it ends with one token's, or that of several alike.
    """
    lo = low.to(tl.int64)
    hi = _key(top).to(tl.int64) + 1
    weight = 0.0 * top
    count = 0 * low
    while hi - lo > 1:
        b = lo + (hi - lo) // 2
        a = lo + (b - lo) // 2
        c = b + (hi - b) // 2
        weight_a, weight_b, weight_c, count_a, count_b, count_c, least, largest = _probe(
            logits, vocabulary, inverse_temperature, top, lo.to(tl.int32), a.to(tl.int32), b.to(tl.int32),
            c.to(tl.int32), hi.to(tl.int32), TILE,
        )  # fmt: skip
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


@triton.jit(do_not_specialize=["wanted"])
def bound_kernel(
    logits, highest, totals, vocabulary, stride, tiles, inverse_temperature, groups, bounds, whole_there, counts,
    settled, wanted, top_p, floor, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A key, (B,) int32, that `wanted` groups reach, or a few more; lower ones than any token that can be kept don't
    come in. Whether it is the lowest that can be, so that nothing is missing above: (B,) int32.
    """
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    stats = row * tiles + tile
    top = tl.max(tl.load(highest + stats, mask=tile < tiles, other=float("-inf")), 0)
    whole = tl.sum(tl.load(totals + stats, mask=tile < tiles, other=0.0)
                   * tl.exp(tl.load(highest + stats, mask=tile < tiles, other=float("-inf")) - top), 0)  # fmt: skip
    lowest = _key(top - DEPTH)
    if not HAS_TOP_K:  # of the whole, which is known; a little room for rounding
        if HAS_TOP_P:  # all below weigh together what top-p leaves out
            share = top + tl.log((1.0 - top_p) * whole / vocabulary) - 0.01
            lowest = tl.maximum(lowest, _key(tl.where(share == share, share, float("-inf"))))
        if HAS_MIN_P:
            lowest = tl.maximum(lowest, _key(top + floor - 0.01))
    number = tiles * (TILE // GROUP)
    place = tl.arange(0, WIDTH)
    m = tl.load(groups + row * number + place, mask=place < number, other=float("-inf"))
    key = _key(tl.where(m == m, m, float("-inf")))
    lo = lowest.to(tl.int64)
    hi = tl.maximum(_key(top).to(tl.int64) + 1, lo + 1)
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
    logits, highest, totals, vocabulary, stride, tiles, inverse_temperature, groups, candidates, bounds, whole_there,
    counts, settled, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tokens at or above the bound, in any order: (B, ROOM) int64, whose order is that of likelihood, ties by
    index. More than there is room for are counted only.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    low = tl.load(bounds + row)
    if _key(tl.load(highest + row * tiles + tile)) >= low:
        z, places = _groups_above(
            logits, groups, row, tile, tiles, vocabulary, stride, inverse_temperature, _value(low), TILE
        )
        z, places = tl.reshape(z, (TILE,)), tl.reshape(places, (TILE,))
        key = _key(z)
        chosen = ((key >= low) & (z == z) & (places < vocabulary)).to(tl.int32)
        at = tl.atomic_add(counts + row, tl.sum(chosen, 0)) + tl.cumsum(chosen, 0) - 1
        packed = (-key.to(tl.int64) << 32) | places.to(tl.int64)
        tl.store(candidates + row.to(tl.int64) * ROOM + at, packed, mask=(chosen > 0) & (at < ROOM))


@triton.jit(do_not_specialize=["state", "top_k"])
def sorted_kernel(
    logits, highest, totals, vocabulary, stride, tiles, inverse_temperature, streams, positions, tokens, logprobs,
    state, min_p, candidates, bounds, whole_there, counts, settled, top_k, top_p, HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, ROOM: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
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
        e = tl.where(exists, tl.exp(_value(key) - top), 0.0)
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
        passed = tl.cumsum(e, 0) > _uniform(state, streams, positions, row) * kept
        chosen = tl.min(tl.where(passed & (e > 0), place, NOWHERE), 0)
        last = tl.max(tl.where(e > 0, place, 0), 0)
        chosen = tl.where(chosen == NOWHERE, last, chosen)
        token = tl.sum(tl.where(place == chosen, packed & 0xFFFFFFFF, 0), 0)
        z = tl.sum(tl.where((place == chosen) & exists, _value(key), 0.0), 0)
        if enough & (count > 0):
            tl.store(tokens + row, token)
            tl.store(logprobs + row, z - top - tl.log(kept) + 0.0 * whole)
            tl.store(settled + row, 1)


@triton.jit(do_not_specialize=["state", "top_k"])
def filtered_kernel(
    logits, highest, totals, vocabulary, stride, tiles, inverse_temperature, streams, positions, tokens, logprobs,
    state, min_p, settled, top_k, top_p, floor, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
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
    low = _key(top - DEPTH)
    kept, number = _weight_from(logits, vocabulary, inverse_temperature, top, low, TILE)
    ties = 0 * number + NOWHERE
    if HAS_TOP_K:  # noqa: SIM102  known when compiling; the other is not
        if number > top_k:
            low, weight, count = _search(logits, vocabulary, inverse_temperature, top, low, top_k, True, False, TILE)
            ties = top_k - count
            kept = weight + ties.to(tl.float32) * tl.exp(_value(low) - top)
    if HAS_TOP_P:
        target = top_p * kept
        key, weight, count = _search(logits, vocabulary, inverse_temperature, top, low, target, False, False, TILE)
        one = tl.exp(_value(key) - top)
        ties = tl.where(key == low, ties, NOWHERE)
        ties = tl.minimum(tl.maximum(tl.ceil((target - weight) / one), 1.0), ties.to(tl.float32)).to(tl.int32)
        low = key
        kept = weight + ties.to(tl.float32) * one
    if HAS_MIN_P:
        key = _key(top + floor)  # floor: the logarithm of min_p
        if key > low:
            kept, _ = _weight_from(logits, vocabulary, inverse_temperature, top, key, TILE)
            low = key
            ties = 0 * number + NOWHERE
    target = _uniform(state, streams, positions, row) * kept
    key, weight, _ = _search(logits, vocabulary, inverse_temperature, top, low, target, False, True, TILE)
    wanted = tl.floor((target - weight) / tl.exp(_value(key) - top))
    wanted = tl.minimum(tl.maximum(wanted, 0.0), (tl.where(key == low, ties, NOWHERE) - 1).to(tl.float32)).to(tl.int32)
    token = 0 * key - 1
    last = 0 * key
    passed = 0 * key
    for step in range(tl.cdiv(vocabulary, TILE)):
        z = _tile(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        places = step * TILE + tl.arange(0, TILE)
        same = ((_key(z) == key) & (places < vocabulary)).to(tl.int32)
        rank = passed + tl.cumsum(same, 0) - 1
        token = tl.maximum(token, tl.max(tl.where((same > 0) & (rank == wanted), places, -1), 0))
        last = tl.maximum(last, tl.max(tl.where(same > 0, places, 0), 0))
        passed += tl.sum(same, 0)
    tl.store(tokens + row, tl.where(token < 0, last, token))
    tl.store(logprobs + row, _value(key) - top - tl.log(kept) + 0.0 * whole)
