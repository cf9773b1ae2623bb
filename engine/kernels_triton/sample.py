"""`engine.kernels.sample` in Triton: one program per row, which searches thresholds instead of sorting.

Top-k and top-p both need one function: the largest logit v for which the tokens with logits >= v reach a target, by
number (top-k) or by weight (top-p). `_search` finds v by bisection. Each pass over the row evaluates one threshold and
narrows the interval to logits that occur in the row, so a search ends after about log2(V) passes. Equal logits are
taken in the order of the vocabulary.

A program reads its row from memory once; the row stays in the L2 cache for the passes that follow. Without top-k and
top-p three passes suffice: the maximum, the sum of weights, and the cumulative sum.

Left out: several programs per row.
"""

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # logits per step of a pass
# e^-104 is 0 in fp32: tokens this far below the largest logit have no weight.
DEPTH = tl.constexpr(104.0)


def sample(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Compute `engine.kernels.sample` for logits on a GPU."""
    batch, vocabulary = logits.shape
    tokens, logprobs = uniforms.new_empty(batch, dtype=torch.int64), uniforms.new_empty(batch)
    if batch == 0:
        return tokens, logprobs
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    greedy = temperature == 0
    row_kernel[(batch,)](
        logits,
        uniforms,
        tokens,
        logprobs,
        vocabulary,
        logits.stride(0),
        1.0 if greedy else 1.0 / temperature,
        top_k,
        top_p,
        log(min_p) if min_p > 0 else 0.0,
        GREEDY=greedy,
        HAS_TOP_K=not greedy and 0 < top_k < vocabulary,
        HAS_TOP_P=not greedy and top_p < 1,
        HAS_MIN_P=not greedy and min_p > 0,
        TILE=TILE,
        num_warps=16,
    )
    return tokens, logprobs


@triton.jit
def _tile(logits, start, vocabulary, inverse_temperature, TILE: tl.constexpr):
    """z (TILE,) fp32 of a row from `start` on; -inf beyond the vocabulary."""
    columns = start + tl.arange(0, TILE)
    z = tl.load(logits + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    return z * inverse_temperature, columns


@triton.jit
def _largest(logits, vocabulary, inverse_temperature, TILE: tl.constexpr):
    """The largest logit, and the number of NaN."""
    largest = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    nans = tl.zeros((TILE,), dtype=tl.int32)
    for step in range(tl.cdiv(vocabulary, TILE)):
        z, _ = _tile(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        largest = tl.maximum(largest, tl.where(z == z, z, float("-inf")))
        nans += (z != z).to(tl.int32)
    return tl.max(largest, 0), tl.sum(nans, 0)


@triton.jit
def _from(logits, vocabulary, inverse_temperature, top, threshold, low, high, TILE: tl.constexpr):
    """Evaluate a threshold between `low` and `high`.

    Returns the weight sum e^(z - top) and the number of the tokens with z >= threshold, the smallest logit in
    [threshold, high], and the largest in [low, threshold).
    """
    weight = tl.zeros((TILE,), dtype=tl.float32)
    count = tl.zeros((TILE,), dtype=tl.int32)
    smallest = tl.zeros((TILE,), dtype=tl.float32) + high
    largest = tl.zeros((TILE,), dtype=tl.float32) + low
    for step in range(tl.cdiv(vocabulary, TILE)):
        z, _ = _tile(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        reaches = z >= threshold
        weight += tl.where(reaches, tl.exp(z - top), 0.0)
        count += reaches.to(tl.int32)
        smallest = tl.where(reaches & (z < smallest), z, smallest)
        largest = tl.where((z < threshold) & (z > largest), z, largest)
    return tl.sum(weight, 0), tl.sum(count, 0), tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def _search(logits, vocabulary, inverse_temperature, top, low, target, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Find the largest logit v in [low, top] for which the tokens with z >= v reach the target.

    Returns v, and weight and number of the tokens with z > v; v = low if no logit reaches the target.
    """
    high = top
    weight = 0.0 * top
    count = 0
    while low < high:
        middle = low + 0.5 * (high - low)
        middle = tl.where((middle > low) & (middle <= high), middle, high)  # neighbouring floats
        weight_here, count_here, smallest, largest = _from(
            logits, vocabulary, inverse_temperature, top, middle, low, high, TILE
        )
        reaches = (count_here if BY_COUNT else weight_here) >= target
        low = tl.where(reaches, smallest, low)
        high = tl.where(reaches, high, largest)
        weight = tl.where(reaches, weight, weight_here)
        count = tl.where(reaches, count, count_here)
    return low, weight, count


@triton.jit
def _invert(logits, vocabulary, inverse_temperature, top, low, ties, target, TILE: tl.constexpr):
    """The first token at which the cumulative weight of the tokens that remain exceeds the target.

    Tokens with z > low remain, and the first `ties` tokens with z = low. If rounding leaves the sum of all weights
    below the target, the last token that has a weight is returned.
    """
    token = 0
    found = 0
    passed = 0.0 * target
    equal = 0
    for step in range(tl.cdiv(vocabulary, TILE)):
        z, columns = _tile(logits, step * TILE, vocabulary, inverse_temperature, TILE)
        same = (z == low).to(tl.int32)
        remain = (z > low) | ((same > 0) & (equal + tl.cumsum(same, 0) <= ties))
        e = tl.where(remain, tl.exp(z - top), 0.0)
        above = (passed + tl.cumsum(e, 0) > target) & (e > 0)
        here = tl.min(tl.where(above, columns, vocabulary), 0)
        last = tl.max(tl.where(e > 0, columns, token), 0)
        token = tl.where(found > 0, token, tl.where(here < vocabulary, here, last))
        found = tl.maximum(found, (here < vocabulary).to(tl.int32))
        passed += tl.sum(e, 0)
        equal += tl.sum(same, 0)
    return token


@triton.jit(do_not_specialize=["top_k"])
def row_kernel(
    logits,
    uniforms,
    tokens,
    logprobs,
    vocabulary,
    stride,
    inverse_temperature,
    top_k,
    top_p,
    log_min_p,
    GREEDY: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sample the token of one row.

    The tokens that remain have z >= `low`; of those with z = `low` only the first `ties` remain. Their weight is
    `total`.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    top, nans = _largest(logits, vocabulary, inverse_temperature, TILE)
    low = top - DEPTH
    if HAS_MIN_P and not (HAS_TOP_K or HAS_TOP_P):
        low = tl.maximum(low, top + log_min_p)
    total, number, low, _below = _from(logits, vocabulary, inverse_temperature, top, low, low, top, TILE)
    ties = number
    if HAS_TOP_K:  # noqa: SIM102  a constant; the other condition is evaluated on the device
        if number > top_k:
            low, weight, count = _search(logits, vocabulary, inverse_temperature, top, low, top_k, True, TILE)
            ties = top_k - count
            total = weight + ties.to(tl.float32) * tl.exp(low - top)
    if HAS_TOP_P:
        target = top_p * total
        edge, weight, _ = _search(logits, vocabulary, inverse_temperature, top, low, target, False, TILE)
        one = tl.exp(edge - top)
        most = tl.where(edge == low, ties, number).to(tl.float32)
        ties = tl.minimum(tl.maximum(tl.ceil((target - weight) / one), 1.0), most).to(tl.int32)
        low = edge
        total = weight + ties.to(tl.float32) * one
    if HAS_MIN_P and (HAS_TOP_K or HAS_TOP_P):  # noqa: SIM102
        if top + log_min_p > low:
            total, ties, low, _below = _from(
                logits, vocabulary, inverse_temperature, top, top + log_min_p, low, top, TILE
            )
    target = tl.load(uniforms + row) * total
    if GREEDY:  # the first of the most probable tokens
        low = top
        target = 0.0 * total
    token = _invert(logits, vocabulary, inverse_temperature, top, low, ties, target, TILE)
    value = tl.load(logits + token).to(tl.float32) * inverse_temperature
    tl.store(tokens + row, token)
    tl.store(logprobs + row, tl.where(nans > 0, float("nan"), value - top - tl.log(total)))
