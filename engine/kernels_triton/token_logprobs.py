"""`token_logprobs` in Triton: the same function as in engine/kernels/token_logprobs.py, whose formulas it has.

Forward is one kernel over tiles of (tokens, vocabulary): a tile of logits is accumulated in fp32, reduced to four
numbers a row - the maximum m, s = sum e^(z - m), t = sum e^(z - m) (z - m), the target's logit - and forgotten. Then
logprob = z_y - m - log s and entropy = log s - t / s. A program owns one tile of tokens and a run of the vocabulary
(a split); a second kernel joins the splits. With many tokens there are enough tiles to fill a card and splits only
balance it; with few, as while decoding, the splits are what fills it and the weight is read once. Programs that run
together share a few tiles of tokens and a few of the weight (grouped order), which then come from the L2 cache.

Backward is a hybrid: a kernel computes a tile of logits again and writes its gradient, in the weight's dtype, into a
bounded buffer (tokens x a chunk of the vocabulary); two cuBLAS products turn the chunk into its rows of dW, whole and
written once, and a share of dH, both accumulated in fp32. Three products in all. With dH and dW made inside kernels
too it would be four, as each has to compute the logits for itself, and dH would not fit: a (128, D) fp32 accumulator
is larger than a multiprocessor's registers from D = 512 on, so it would need atomics on memory, whose sums change
from run to run. What the buffer costs is little: at D = 1024 on an H200, 2 bytes written and 4 read a logit against
6 * 1024 floating-point operations make about a sixth of the time at peak rates, and less in proportion to D. Keeping
logits in fp32 instead of recomputing them by our kernel would move 10 bytes a logit more.

Tiles: 128 x 256 x 64 with 8 warps on Hopper and Blackwell. A 128 x 128 tile asks the L2 cache for a byte every 64
operations, 15 TB/s at peak, twice what it has; 128 x 256 asks for a third less. Chosen by this arithmetic, and by
spills and shared memory of the compiled kernels (docs/engineering/kernels.md), not yet measured on a GPU.

Left out: tensor-memory-accelerator loads.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels.products import product
from engine.kernels.token_logprobs import Head, check, wanted
from engine.kernels_triton.device import Card, card, dot_precision, multiprocessors

# Elements of the buffer that backward holds at once: 128 MB in bf16.
CHUNK_ELEMENTS = 2**26
GROUP = 8  # tiles of tokens that run together
LOWEST = tl.constexpr(-1e30)  # stands for -inf, which would make NaN of 0 * inf


@dataclass(frozen=True)
class Tiles:
    """Tokens, columns of the vocabulary and hidden units a step, and how a program is run."""

    tokens: int
    columns: int
    width: int
    warps: int
    stages: int


def tiles_for(tokens: int, dtype: torch.dtype, on: Card, softcap: float | None = None) -> Tiles:
    """Tiles for so many tokens on such a GPU.

    Cards for desks and graphics (8.6, 8.9, 12.0) have 99 KB of shared memory where others have 163 or 227. The soft
    cap's slope takes registers, which a tile of 256 columns has none left of: it would spill.
    """
    if dtype == torch.float32:
        return Tiles(16, 64, 32, 4, 3) if tokens <= 16 else Tiles(64, 64, 32, 4, 3)
    if tokens <= 16:  # the weight's bandwidth is all: many bytes in flight, 36 KB a stage
        return Tiles(16, 128, 128, 4, 4 if on.shared > 120 * 1024 else 3)
    if tokens <= 64:
        return Tiles(64, 128, 64, 4, 4)
    wide = on.capability >= 90 and on.shared > 160 * 1024 and softcap is None
    return Tiles(128, 256, 64, 8, 3) if wide else Tiles(128, 128, 64, 8, 3)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `engine.kernels.token_logprobs.token_logprobs`. A target outside of the vocabulary gives NaN."""
    check(hidden, weight, targets, temperature)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, bias, Head(temperature, softcap))
    return logprobs, entropy


@triton.jit
def _program(m_tiles, splits, GROUP: tl.constexpr):
    """Which tile of tokens and which split this program owns: GROUP tiles of tokens, then the next split."""
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
    """z (BM, BN) fp32 of a tile; LOWEST beyond the vocabulary.

    Beyond the last token or column the last one is read again. Addresses are 64 bits for the tile and 32 within it.
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


@triton.jit
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
    """m, s, t of one tile of tokens over one split, (splits, N) fp32 each, and the target's logit (N,) if there."""
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


@triton.jit
def join_kernel(highest, totals, moments, target_logits, logprobs, entropies, lses, tokens, splits, BM: tl.constexpr):
    """(splits, N) m, s, t and (N,) target logits -> (N,) log-probabilities, entropies, log-sum-exps."""
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


@triton.jit
def backward_kernel(
    hidden,
    weight,
    bias,
    targets,
    lses,
    entropies,
    of_logprob,
    of_entropy,
    d_logits,
    tokens,
    first,
    last,
    width,
    stride_h,
    stride_w,
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
    """The gradient of the logits [first, last) before temperature and soft cap, (N, last - first): a tile a program."""
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
    g = tl.load(of_logprob + rows)[:, None]
    pull = g
    if HAS_ENTROPY:
        e = tl.load(of_entropy + rows)
        pull = logp * e[:, None] + (g + (e * tl.load(entropies + rows))[:, None])
    columns = tl.arange(0, BN)
    target = tl.load(targets + rows).to(tl.int32) - first - start
    dz = tl.where(columns[None, :] == target[:, None], g, 0.0) - tl.exp(logp) * pull
    if HAS_SOFTCAP:
        bounded = z / (softcap * inverse_temperature)
        dz *= 1.0 - bounded * bounded
    dz = (dz * inverse_temperature).to(d_logits.dtype.element_ty)
    out = d_logits + (tile * BM).to(tl.int64) * (last - first) + start
    inside = (places < tokens)[:, None] & (columns < last - first - start)[None, :]
    tl.store(out + tl.arange(0, BM)[:, None] * (last - first) + columns[None, :], dz, mask=inside)


@dataclass(frozen=True)
class _Head:
    """A head's constants and tiles, as both kernels take them."""

    inverse_temperature: float
    softcap: float | None
    tiles: Tiles

    def options(self, width: int, bias: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
        t = self.tiles
        return {
            "BM": t.tokens,
            "BN": t.columns,
            "BD": t.width,
            "GROUP": GROUP,
            "EVEN": width % t.width == 0,
            "HAS_BIAS": bias is not None,
            "HAS_SOFTCAP": self.softcap is not None,
            "PRECISION": dot_precision(dtype),
            "num_warps": t.warps,
            "num_stages": t.stages,
        }


def _tiled(head: Head, hidden: Tensor) -> _Head:
    tiles = tiles_for(hidden.shape[0], hidden.dtype, card(hidden.device), head.softcap)
    return _Head(1.0 / head.temperature, head.softcap, tiles)


def _dense(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As the kernels read them: hidden and weight of one dtype, last dimensions dense."""
    common = torch.promote_types(hidden.dtype, weight.dtype)
    bias = None if bias is None else bias.contiguous()
    return _rows(hidden.to(common)), _rows(weight.to(common)), targets.contiguous(), bias


def _forward(head: _Head, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, log-sum-exps: (N,) fp32 each."""
    (tokens, width), vocabulary, tiles = hidden.shape, weight.shape[0], head.tiles
    out = hidden.new_empty(3, tokens, dtype=torch.float32)
    if tokens == 0:
        return out[0], out[1], out[2]
    m_tiles, v_tiles = triton.cdiv(tokens, tiles.tokens), triton.cdiv(vocabulary, tiles.columns)
    # Eight waves of programs even out the last one; 16 splits at least, so that they are never long.
    splits = min(v_tiles, max(16, triton.cdiv(8 * multiprocessors(hidden.device), m_tiles)))
    tiles_a_split = triton.cdiv(v_tiles, splits)
    splits = triton.cdiv(v_tiles, tiles_a_split)
    partial = hidden.new_empty(3, splits, tokens, dtype=torch.float32)
    target_logits = hidden.new_full((tokens,), float("nan"), dtype=torch.float32)
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
        head.inverse_temperature,
        head.softcap or 0.0,
        splits,
        tiles_a_split,
        **head.options(width, bias, hidden.dtype),
    )
    join_kernel[(triton.cdiv(tokens, 64),)](
        partial[0], partial[1], partial[2], target_logits, out[0], out[1], out[2], tokens, splits, BM=64, num_warps=2
    )
    return out[0], out[1], out[2]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, head: Head
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtypes, ctx.head = (hidden.dtype, weight.dtype), head
        hidden, weight, targets, bias = _dense(hidden, weight, targets, bias)
        logprobs, entropy, lse = _forward(_tiled(head, hidden), hidden, weight, targets, bias)
        ctx.save_for_backward(hidden, weight, targets, bias, lse, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, lse, entropy = ctx.saved_tensors
        d_hidden, d_weight, d_bias = gradients(
            ctx.head, hidden, weight, targets, bias, lse, entropy, *upstream, wants=wanted(ctx)
        )
        of_hidden, of_weight = ctx.dtypes
        d_hidden = None if d_hidden is None else d_hidden.to(of_hidden)
        return d_hidden, (None if d_weight is None else d_weight.to(of_weight)), None, d_bias, None


def statistics(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `engine.kernels.token_logprobs.statistics`."""
    elsewhere = (targets < 0) | (targets >= weight.shape[0])
    hidden, weight, targets, bias = _dense(hidden, weight, targets, bias)
    logprobs, entropy, lse = _forward(_tiled(head, hidden), hidden, weight, targets, bias)
    return torch.where(elsewhere, -lse, logprobs), entropy, lse


def gradients(
    head: Head,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    of_logprob: Tensor | None,
    of_entropy: Tensor | None,
    *,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `engine.kernels.token_logprobs.gradients`."""
    hidden, weight, targets, bias = _dense(hidden, weight, targets, bias)
    tiled = _tiled(head, hidden)
    g = torch.zeros_like(lse) if of_logprob is None else of_logprob.contiguous()
    e = None if of_entropy is None else of_entropy.contiguous()
    d_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if wants[0] else None
    d_weight = torch.empty_like(weight) if wants[1] else None
    d_bias = torch.empty_like(bias) if wants[2] and bias is not None else None
    for first, last in _chunks(hidden.shape[0], weight.shape[0]):
        dz = _logit_gradient(tiled, hidden, weight, targets, bias, lse, entropy, g, e, first, last)
        if d_hidden is not None:
            d_hidden += product(dz, weight[first:last])
        if d_weight is not None:
            d_weight[first:last] = product(dz.T, hidden)
        if d_bias is not None:
            d_bias[first:last] = dz.sum(0, dtype=torch.float32)
    return d_hidden, d_weight, d_bias


def _logit_gradient(
    head: _Head,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    first: int,
    last: int,
) -> Tensor:
    """The gradient of the logits [first, last): (N, last - first) in the dtype of the products that follow."""
    tokens, width = hidden.shape
    dz = hidden.new_empty(tokens, last - first)
    if tokens == 0:
        return dz
    programs = triton.cdiv(tokens, head.tiles.tokens) * triton.cdiv(last - first, head.tiles.columns)
    backward_kernel[(programs,)](
        hidden,
        weight,
        bias,
        targets,
        lse,
        entropy,
        of_logprob,
        of_entropy,
        dz,
        tokens,
        first,
        last,
        width,
        hidden.stride(0),
        weight.stride(0),
        head.inverse_temperature,
        head.softcap or 0.0,
        HAS_ENTROPY=of_entropy is not None,
        **head.options(width, bias, hidden.dtype),
    )
    return dz


def _chunks(tokens: int, vocabulary: int) -> list[tuple[int, int]]:
    """Cut the vocabulary into chunks [first, last) of at most CHUNK_ELEMENTS gradients, 256 columns at least."""
    size = max(256, CHUNK_ELEMENTS // max(tokens, 1) // 256 * 256)
    return [(first, min(first + size, vocabulary)) for first in range(0, vocabulary, size)]


def _rows(x: Tensor) -> Tensor:
    """`x` with its last dimension dense, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()
