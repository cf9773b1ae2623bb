"""`statistics` and `gradients` of `engine.kernels.token_logprobs` in Triton, with the formulas of that file.

Forward is one kernel over tiles of (tokens, vocabulary). It accumulates a tile of logits in fp32 and reduces it to
four numbers per row: the maximum m, s = sum e^(z - m), t = sum e^(z - m) (z - m), and the target's logit. Then
logprob = z_y - m - log s and entropy = log s - t / s. A program computes one tile of tokens and one split (a range of
the vocabulary); a second kernel joins the splits. With many tokens the tiles fill a GPU and splits balance its load;
with few tokens the splits fill it and the weight is read once. Programs that run at the same time share a few tiles
of tokens and of the weight (grouped order), which then come from the L2 cache.

Backward has two parts. A kernel computes a tile of logits again and writes their gradient, in the weight's dtype,
into a bounded buffer (tokens x a chunk of the vocabulary). Two cuBLAS products then turn the buffer into the chunk's
rows of dW, written once, and a summand of dH, both accumulated in fp32. These are three products. Kernels that
compute dH and dW too would need four, because each would compute the logits for itself. A (128, D) fp32 accumulator
of dH exceeds the registers of a multiprocessor from D = 512 on, so dH would need atomics, whose sums change from run
to run. At D = 1024 on an H100 the buffer costs about a sixth of the time at peak rates (2 bytes written and 4 read
per logit), and less with a larger D.

Tiles are 128 x 256 x 64 with 8 warps on Hopper and Blackwell. A 128 x 128 tile reads a byte from the L2 cache every
64 operations, 15 TB/s at peak rate, which is twice the bandwidth of the cache; 128 x 256 reads a third less. The
tiles were chosen by this arithmetic and by the registers and the shared memory of the compiled kernels. They have not
been measured on a GPU.

Left out: loads by the tensor memory accelerator.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.products import product
from engine.kernels.token_logprobs import Head
from engine.kernels_triton.device import Card, card, dot_precision, multiprocessors

# Elements of the buffer of backward: 128 MB in bf16.
CHUNK_ELEMENTS = 2**26
GROUP = 8  # tiles of tokens that run at the same time
LOWEST = tl.constexpr(-1e30)  # instead of -inf, because 0 * inf is NaN
# Arguments that differ between micro-batches. Triton would compile a kernel again if one of the numbers becomes 1 or a
# multiple of 16, or if the address of one of the vectors becomes a multiple of 16.
NUMBERS = ["tokens", "splits", "tiles_a_split", "first", "last"]
VECTORS = [
    *("targets", "highest", "totals", "moments", "target_logits", "logprobs", "entropies", "lses"),
    *("d_logprobs", "d_entropies"),
]


@dataclass(frozen=True)
class Tiles:
    """The size of a step in tokens, columns of the vocabulary and hidden units; warps and stages of a program."""

    tokens: int
    columns: int
    width: int
    warps: int
    stages: int


def tiles_for(tokens: int, dtype: torch.dtype, on: Card, softcap: float | None = None) -> Tiles:
    """Return the tiles for a number of tokens on a GPU.

    Workstation GPUs (8.6, 8.9, 12.0) have 99 KB of shared memory, others 163 or 227 KB. With 256 columns the derivative
    of the soft cap would spill registers.
    """
    if dtype == torch.float32:
        return Tiles(16, 64, 32, 4, 3) if tokens <= 16 else Tiles(64, 64, 32, 4, 3)
    if tokens <= 16:  # bound by the bandwidth of the weight: many bytes in flight, 36 KB per stage
        return Tiles(16, 128, 128, 4, 4 if on.shared > 120 * 1024 else 3)
    if tokens <= 64:
        return Tiles(64, 128, 64, 4, 4)
    wide = on.capability >= 90 and on.shared > 160 * 1024 and softcap is None
    return Tiles(128, 256, 64, 8, 3) if wide else Tiles(128, 128, 64, 8, 3)


def _jit(kernel: Callable[..., None]) -> Any:
    """Declare a kernel that is compiled once for all micro-batches of a model that have the same tiles."""
    arguments = inspect.signature(kernel).parameters
    numbers, vectors = ([name for name in names if name in arguments] for names in (NUMBERS, VECTORS))
    return triton.jit(kernel, do_not_specialize=numbers, do_not_specialize_on_alignment=vectors)


@triton.jit
def _program(m_tiles, splits, GROUP: tl.constexpr):
    """The tile of tokens and the split of this program: GROUP tiles of tokens, then the next split."""
    index = tl.program_id(0)
    group = index // (GROUP * splits)
    size = tl.minimum(m_tiles - group * GROUP, GROUP)
    within = index - group * GROUP * splits
    return group * GROUP + within % size, within // size


@triton.jit
def _logits(
    hidden,
    weight,
    bias,
    first_row,
    first_column,
    tokens,
    vocabulary,
    width,
    stride_h,
    stride_w,
    inverse_temperature,
    softcap,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return z (BM, BN) fp32 of a tile; LOWEST beyond the vocabulary.

    Beyond the last token or column the last one is read again. Offsets are 64 bits for the tile and 32 bits inside it.
    """
    columns = tl.arange(0, BN)
    units = tl.arange(0, BD)
    existing = tl.minimum(columns, vocabulary - 1 - first_column)
    rows = tl.minimum(tl.arange(0, BM), tokens - 1 - first_row)
    hidden += first_row.to(tl.int64) * stride_h
    weight += first_column.to(tl.int64) * stride_w
    h = rows[:, None] * stride_h + units[None, :]
    w = existing[None, :] * stride_w + units[:, None]
    z = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, width, BD):
        if EVEN:
            z = tl.dot(tl.load(hidden + start + h), tl.load(weight + start + w), z, input_precision=PRECISION)
        else:
            left = units < width - start
            a = tl.load(hidden + start + h, mask=left[None, :], other=0.0)
            z = tl.dot(a, tl.load(weight + start + w, mask=left[:, None], other=0.0), z, input_precision=PRECISION)
    if HAS_BIAS:
        z += tl.load(bias + first_column + existing).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))  # tanh, without overflow
    z = z * inverse_temperature
    z = tl.where(z < LOWEST, LOWEST, z)  # a comparison lets NaN pass
    return tl.where((columns < vocabulary - first_column)[None, :], z, LOWEST)


@_jit
def forward_kernel(
    hidden,
    weight,
    bias,
    targets,
    highest,
    totals,
    moments,
    target_logits,
    tokens,
    vocabulary,
    width,
    stride_h,
    stride_w,
    inverse_temperature,
    softcap,
    splits,
    tiles_a_split,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write m, s, t of one tile of tokens over one split, (splits, N) fp32 each, and target logits (N,) if inside."""
    tile, split = _program(tl.cdiv(tokens, BM), splits, GROUP)
    places = tile * BM + tl.arange(0, BM)
    rows = tl.minimum(places, tokens - 1)
    target = tl.load(targets + rows).to(tl.int32)
    m = tl.full((BM,), LOWEST, dtype=tl.float32)
    s = tl.zeros((BM,), dtype=tl.float32)
    t = tl.zeros((BM,), dtype=tl.float32)
    chosen = tl.zeros((BM,), dtype=tl.float32)
    first = split * tiles_a_split * BN
    last = tl.minimum(first + tiles_a_split * BN, vocabulary)
    for step in range(tl.cdiv(last - first, BN)):
        start = first + step * BN
        z = _logits(
            hidden,
            weight,
            bias,
            tile * BM,
            start,
            tokens,
            vocabulary,
            width,
            stride_h,
            stride_w,
            inverse_temperature,
            softcap,
            BM,
            BN,
            BD,
            EVEN,
            HAS_BIAS,
            HAS_SOFTCAP,
            PRECISION,
        )
        chosen += tl.sum(tl.where(tl.arange(0, BN)[None, :] == (target - start)[:, None], z, 0.0), 1)
        above = tl.maximum(m, tl.max(z, 1))
        shrink = tl.exp(m - above)
        z -= above[:, None]
        e = tl.exp(z)
        t = shrink * (t + s * (m - above)) + tl.sum(e * z, 1)
        s = shrink * s + tl.sum(e, 1)
        m = above
    exist = places < tokens
    here = split * tokens + rows
    tl.store(highest + here, m, mask=exist)
    tl.store(totals + here, s, mask=exist)
    tl.store(moments + here, t, mask=exist)
    tl.store(target_logits + rows, chosen, mask=exist & (target >= first) & (target < last))


@_jit
def join_kernel(highest, totals, moments, target_logits, logprobs, entropies, lses, tokens, splits, BM: tl.constexpr):
    """Join m, s, t (splits, N) and target logits (N,) to log-probabilities, entropies and log-sum-exps, (N,) each."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    exist = rows < tokens
    m = tl.full((BM,), LOWEST, dtype=tl.float32)
    s = tl.zeros((BM,), dtype=tl.float32)
    t = tl.zeros((BM,), dtype=tl.float32)
    for split in range(splits):
        here = split * tokens + rows
        m_here = tl.load(highest + here, mask=exist, other=0.0)
        s_here = tl.load(totals + here, mask=exist, other=1.0)
        t_here = tl.load(moments + here, mask=exist, other=0.0)
        above = tl.maximum(m, m_here)
        before, after = tl.exp(m - above), tl.exp(m_here - above)
        t = before * (t + s * (m - above)) + after * (t_here + s_here * (m_here - above))
        s = before * s + after * s_here
        m = above
    lse = m + tl.log(s)
    z = tl.load(target_logits + rows, mask=exist, other=0.0)
    tl.store(lses + rows, lse, mask=exist)
    tl.store(logprobs + rows, z - lse, mask=exist)
    tl.store(entropies + rows, tl.log(s) - t / s, mask=exist)


@_jit
def backward_kernel(
    hidden,
    weight,
    bias,
    targets,
    lses,
    entropies,
    d_logprobs,
    d_entropies,
    d_logits,
    tokens,
    first,
    last,
    width,
    stride_h,
    stride_w,
    stride_d,
    inverse_temperature,
    softcap,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of the logits [first, last) before temperature and soft cap, (N, last - first): one tile."""
    tile, column_tile = _program(tl.cdiv(tokens, BM), tl.cdiv(last - first, BN), GROUP)
    places = tile * BM + tl.arange(0, BM)
    rows = tl.minimum(places, tokens - 1)
    start = column_tile * BN  # of the columns from `first` on
    z = _logits(
        hidden,
        weight,
        bias,
        tile * BM,
        first + start,
        tokens,
        last,
        width,
        stride_h,
        stride_w,
        inverse_temperature,
        softcap,
        BM,
        BN,
        BD,
        EVEN,
        HAS_BIAS,
        HAS_SOFTCAP,
        PRECISION,
    )
    logp = z - tl.load(lses + rows)[:, None]
    g = tl.load(d_logprobs + rows)[:, None]
    pull = g
    if HAS_ENTROPY:
        e = tl.load(d_entropies + rows)
        pull = logp * e[:, None] + (g + (e * tl.load(entropies + rows))[:, None])
    columns = tl.arange(0, BN)
    target = tl.load(targets + rows).to(tl.int32) - first - start
    dz = tl.where(columns[None, :] == target[:, None], g, 0.0) - tl.exp(logp) * pull
    if HAS_SOFTCAP:
        bounded = z / (softcap * inverse_temperature)
        dz *= 1.0 - bounded * bounded
    dz = (dz * inverse_temperature).to(d_logits.dtype.element_ty)
    out = d_logits + (tile * BM).to(tl.int64) * stride_d + start
    inside = (places < tokens)[:, None] & (columns < last - first - start)[None, :]
    tl.store(out + tl.arange(0, BM)[:, None] * stride_d + columns[None, :], dz, mask=inside)


def constants(tiles: Tiles, width: int, dtype: torch.dtype, has_bias: bool, has_softcap: bool) -> dict[str, Any]:
    """Return the constants and options that the forward and the backward kernel share."""
    return {
        "BM": tiles.tokens,
        "BN": tiles.columns,
        "BD": tiles.width,
        "GROUP": GROUP,
        "EVEN": width % tiles.width == 0,
        "HAS_BIAS": has_bias,
        "HAS_SOFTCAP": has_softcap,
        "PRECISION": dot_precision(dtype),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _dense(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors as the kernels read them: hidden and weight of one dtype, last dimensions dense."""
    common = torch.promote_types(hidden.dtype, weight.dtype)
    hidden, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (hidden.to(common), weight.to(common)))
    return hidden, weight, targets.contiguous(), None if bias is None else bias.contiguous()


def statistics(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `engine.kernels.token_logprobs.statistics`."""
    hidden, weight, targets, bias = _dense(hidden, weight, targets, bias)
    (tokens, width), vocabulary = hidden.shape, weight.shape[0]
    tiles = tiles_for(tokens, hidden.dtype, card(hidden.device), head.softcap)
    out = hidden.new_empty(3, tokens, dtype=torch.float32)
    if tokens == 0:
        return out[0], out[1], out[2]
    m_tiles, v_tiles = triton.cdiv(tokens, tiles.tokens), triton.cdiv(vocabulary, tiles.columns)
    # Eight waves of programs balance the last wave; at least 16 splits keep a program short.
    splits = min(v_tiles, max(16, triton.cdiv(8 * multiprocessors(hidden.device), m_tiles)))
    tiles_a_split = triton.cdiv(v_tiles, splits)
    splits = triton.cdiv(v_tiles, tiles_a_split)
    partial = hidden.new_empty(3, splits, tokens, dtype=torch.float32)
    target_logits = hidden.new_zeros(tokens, dtype=torch.float32)
    forward_kernel[(m_tiles * splits,)](
        hidden,
        weight,
        bias,
        targets,
        partial[0],
        partial[1],
        partial[2],
        target_logits,
        tokens,
        vocabulary,
        width,
        hidden.stride(0),
        weight.stride(0),
        1.0 / head.temperature,
        head.softcap or 0.0,
        splits,
        tiles_a_split,
        **constants(tiles, width, hidden.dtype, bias is not None, head.softcap is not None),
    )
    join_kernel[(triton.cdiv(tokens, 64),)](
        partial[0], partial[1], partial[2], target_logits, out[0], out[1], out[2], tokens, splits, BM=64, num_warps=2
    )
    return out[0], out[1], out[2]


def gradients(
    head: Head,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    *,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute `engine.kernels.token_logprobs.gradients`."""
    hidden, weight, targets, bias = _dense(hidden, weight, targets, bias)
    (tokens, width), vocabulary = hidden.shape, weight.shape[0]
    tiles = tiles_for(tokens, hidden.dtype, card(hidden.device), head.softcap)
    d_logprobs, d_entropy = d_logprobs.contiguous(), None if d_entropy is None else d_entropy.contiguous()
    d_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if needs[0] else None
    d_weight = torch.empty_like(weight) if needs[1] else None
    d_bias = torch.empty_like(bias) if needs[2] and bias is not None else None
    size = max(256, CHUNK_ELEMENTS // max(tokens, 1) // 256 * 256)  # columns of a chunk
    for first in range(0, vocabulary, size):
        last = min(first + size, vocabulary)
        dz = hidden.new_empty(tokens, triton.cdiv(last - first, 16) * 16)[:, : last - first]  # rows are aligned
        programs = triton.cdiv(tokens, tiles.tokens) * triton.cdiv(last - first, tiles.columns)
        if tokens:
            backward_kernel[(programs,)](
                hidden,
                weight,
                bias,
                targets,
                lse,
                entropy,
                d_logprobs,
                d_entropy,
                dz,
                tokens,
                first,
                last,
                width,
                hidden.stride(0),
                weight.stride(0),
                dz.stride(0),
                1.0 / head.temperature,
                head.softcap or 0.0,
                HAS_ENTROPY=d_entropy is not None,
                **constants(tiles, width, hidden.dtype, bias is not None, head.softcap is not None),
            )
        if d_hidden is not None:
            d_hidden += product(dz, weight[first:last])
        if d_weight is not None:
            d_weight[first:last] = product(dz.T, hidden)
        if d_bias is not None:
            d_bias[first:last] = dz.sum(0, dtype=torch.float32)
    return d_hidden, d_weight, d_bias
