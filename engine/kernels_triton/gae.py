"""`gae` in Triton: the same function as in engine/kernels/gae.py, whose formulas it has.

The torch path walks the columns, some six small kernels a token. Here a program owns a row and walks it backwards in
tiles: A_t = delta_t + c A_{t+1} is a first-order recurrence, whose steps (factor, offset) compose associatively
(Blelloch, 1990), so a tile is one scan, and one number is carried to the next. Moments are joined tile by tile and then
row by row by one program, in a fixed order: the same input gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gae import check

TILE = 256


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `engine.kernels.gae.gae`."""
    check(rewards, values, mask)
    batch, length = rewards.shape
    rewards, values, mask = rewards.contiguous(), values.contiguous(), mask.contiguous()
    out = rewards.new_empty(2, batch, length, dtype=torch.float32)
    of_rows = rewards.new_zeros(3, batch, dtype=torch.float32)
    moments = rewards.new_zeros(3, dtype=torch.float32)
    if batch and length:
        tile = min(TILE, triton.next_power_of_2(length))
        row_kernel[(batch,)](
            rewards, values, mask, out[0], out[1], of_rows, batch, length, gamma, gamma * lam, TILE=tile, num_warps=4
        )
        rows = min(1024, triton.next_power_of_2(batch))
        moments_kernel[(1,)](of_rows, moments, batch, TILE=rows, num_warps=4)
    return out[0], out[1], moments


@triton.jit
def _compose(factor, offset, next_factor, next_offset):
    """x -> factor x + offset, then x -> next_factor x + next_offset."""
    return factor * next_factor, next_factor * offset + next_offset


@triton.jit
def _join(count, mean, squares, counts, means, deviations):
    """Moments of a set and of a tile of sets -> of their union."""
    here = tl.sum(counts, 0)
    middle = tl.sum(counts * means, 0) / tl.maximum(here, 1.0)
    spread = tl.sum(deviations + counts * (means - middle) * (means - middle), 0)
    total = count + here
    step = middle - mean
    share = here / tl.maximum(total, 1.0)
    return total, mean + step * share, squares + spread + step * step * count * share


@triton.jit
def row_kernel(rewards, values, mask, advantages, returns, moments, batch, length, gamma, decay, TILE: tl.constexpr):
    """Advantages and returns of one row, and its moments into (3, B)."""
    row = tl.program_id(0)
    base = row.to(tl.int64) * length
    following = gamma * 0.0
    count = gamma * 0.0
    mean = gamma * 0.0
    squares = gamma * 0.0
    for step in range(tl.cdiv(length, TILE)):
        # From the row's end: place 0 of the tile is its last token, so that the scan runs forwards.
        t = length - 1 - step * TILE - tl.arange(0, TILE)
        exist = t >= 0
        here = base + t
        counts = tl.load(mask + here, mask=exist, other=0).to(tl.int1)
        after = exist & (t + 1 < length)
        next_counts = tl.load(mask + here + 1, mask=after, other=0).to(tl.int1)
        r = tl.load(rewards + here, mask=counts & exist, other=0.0).to(tl.float32)
        v = tl.load(values + here, mask=counts & exist, other=0.0).to(tl.float32)
        next_v = tl.load(values + here + 1, mask=next_counts & after, other=0.0).to(tl.float32)
        delta = tl.where(counts, r + gamma * next_v - v, 0.0)
        factor, offset = tl.associative_scan((tl.where(counts, decay, 0.0), delta), 0, _compose)
        a = factor * following + offset
        following = tl.sum(tl.where(tl.arange(0, TILE) == TILE - 1, a, 0.0), 0)
        tl.store(advantages + here, a, mask=exist)
        tl.store(returns + here, a + v, mask=exist)
        count, mean, squares = _join(count, mean, squares, counts.to(tl.float32), a, 0.0 * v)
    tl.store(moments + row, count)
    tl.store(moments + batch + row, mean)
    tl.store(moments + 2 * batch + row, squares)


@triton.jit
def moments_kernel(of_rows, moments, batch, TILE: tl.constexpr):
    """Moments (3, B) of rows -> (3,) of all."""
    count = tl.sum(tl.zeros((TILE,), dtype=tl.float32), 0)
    mean = count
    squares = count
    for step in range(tl.cdiv(batch, TILE)):
        row = step * TILE + tl.arange(0, TILE)
        exist = row < batch
        counts = tl.load(of_rows + row, mask=exist, other=0.0)
        means = tl.load(of_rows + batch + row, mask=exist, other=0.0)
        deviations = tl.load(of_rows + 2 * batch + row, mask=exist, other=0.0)
        count, mean, squares = _join(count, mean, squares, counts, means, deviations)
    tl.store(moments, count)
    tl.store(moments + 1, mean)
    tl.store(moments + 2, squares)
