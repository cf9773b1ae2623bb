"""`sample` in Triton: the same function as in engine/kernels/sample.py, for GPUs, without sorting the vocabulary.

A first kernel walks the logits, tiles of the vocabulary side by side: maximum and total weight of each tile. Unfiltered
rows then need one tile more: the totals say in which one the cumulative sum passes u. The logits are read once and a
tile; nothing as wide as the vocabulary is written.

Filtered rows are drawn from likelihood order. The first kernel then keeps the highest logit of every 32, too; from
these alone a second one finds a logit that what survives lies above: as many groups have one above it as top-k wants
tokens, or as hold a good thousand of them for top-p. A third gathers those tokens, and reads of the row only the groups
that have one. A fourth sorts the few: count and weight along the order say the rest, and whether the few were enough.

Rows where they were not (flat ones under top-p: thousands of tokens make up its share) fall to a fifth kernel, which
does nothing for the others; it searches (sample_search.py).

Sums run in another order than the torch path's, so that a token may differ where u falls within rounding, about 1e-6,
of the border between two.
"""

from math import log
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.generation.sampling import Sampling
from engine.kernels.sample import check
from engine.kernels_triton.sample_candidates import bound_kernel, gather_kernel, room_for, sorted_kernel
from engine.kernels_triton.sample_parts import GROUP, NOWHERE, groups_above, tile_of, uniform
from engine.kernels_triton.sample_search import SCAN, search_kernel

TILE = 4096
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
        search_kernel[(batch,)](*row, *out, found[3], top_k, how.top_p, floor, **kinds, **constants, num_warps=16)
    else:
        if min_p > 0:
            keep_kernel[(batch, tiles)](*row, groups, min_p, **constants, num_warps=8)
        draw_kernel[(batch,)](*row, *out, GREEDY=greedy, **constants, num_warps=8)
    return tokens, logprobs


def _state(seed: int) -> int:
    """The generator's state before a stream is added, an int64: splitmix64 of the seed."""
    state = _mix(seed % SIZE)
    return state - SIZE if state >= SIZE // 2 else state


def _mix(x: int) -> int:
    """splitmix64, as in engine.generation.sampling: of a number in [0, 2^64)."""
    x = (x + 0x9E3779B97F4A7C15) % SIZE
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % SIZE
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % SIZE
    return x ^ (x >> 31)


@triton.jit
def tile_kernel(
    logits,
    highest,
    totals,
    vocabulary,
    stride,
    tiles,
    inverse_temperature,
    groups,
    GROUPED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Maximum and sum e^(z - maximum) of a tile of a row: (B, tiles) fp32 each. Maxima of its groups, where asked for:
    (B, tiles TILE / GROUP).
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    z = tile_of(logits + row.to(tl.int64) * stride, tile * TILE, vocabulary, inverse_temperature, TILE)
    m = tl.max(z, 0)
    base = tl.where(m == float("-inf"), 0.0, m)  # a tile of nothing has weight 0, not NaN
    tl.store(highest + row * tiles + tile, m)
    tl.store(totals + row * tiles + tile, tl.sum(tl.exp(z - base), 0))
    if GROUPED:
        first = (row * tiles + tile) * (TILE // GROUP)
        of_groups = tl.max(tl.reshape(z, (TILE // GROUP, GROUP)), 1)
        tl.store(groups + first + tl.arange(0, TILE // GROUP), of_groups)


@triton.jit
def keep_kernel(
    logits,
    highest,
    totals,
    vocabulary,
    stride,
    tiles,
    inverse_temperature,
    groups,
    min_p,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The totals of tile_kernel without the tokens below `min_p` times the row's likeliest, unknown until then."""
    row = tl.program_id(0)
    here = row * tiles + tl.program_id(1)
    tile = tl.arange(0, TILES)
    top = tl.max(tl.load(highest + row * tiles + tile, mask=tile < tiles, other=float("-inf")), 0)
    bound = top + tl.log(min_p) - 0.01  # a little room for rounding
    z, _ = groups_above(
        logits, groups, row, tl.program_id(1), tiles, vocabulary, stride, inverse_temperature, bound, TILE
    )
    m = tl.load(highest + here)
    base = tl.where(m == float("-inf"), 0.0, m)
    kept = tl.sum(tl.sum(tl.where(tl.exp(z - top) < min_p, 0.0, tl.exp(z - base)), 1), 0)
    tl.store(totals + here, kept + 0.0 * tl.load(totals + here))  # NaN stays


@triton.jit(do_not_specialize=["state"])
def draw_kernel(
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
    GREEDY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
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
        target = uniform(state, streams, positions, row) * total
        chosen = tl.min(tl.where((sums > target) & (weights > 0), tile, NOWHERE), 0)
        last = tl.max(tl.where(weights > 0, tile, 0), 0)
        chosen = tl.where(chosen == NOWHERE, last, chosen)
        before = tl.max(tl.where(tile < chosen, sums, 0.0), 0)
    chosen = tl.minimum(chosen, tiles - 1)
    z = tile_of(logits + row.to(tl.int64) * stride, chosen * TILE, vocabulary, inverse_temperature, TILE)
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
