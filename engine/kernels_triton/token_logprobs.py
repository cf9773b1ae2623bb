"""`reduce_block` and `block_gradient` of `engine.kernels.token_logprobs` in Triton, with the formulas of that file.

cuBLAS multiplies hidden states with a block of the head, and writes the products in fp32. One program of
`reduce_kernel` reads a few rows of them once. It holds, in each lane, the maximum m, s = sum e^(z - m) and
t = sum e^(z - m) (z - m) of the columns of the lane, and joins the lanes of a row at the end: lse = m + log s and
entropy = log s - t / s. `gradient_kernel` reads the products once and writes the gradient in the precision of the
products that follow.

Writing and reading the products moves 8 bytes for each logit, and computing them takes 2 D operations. At peak rates
of an H100 both take equally long at D = 1,200. A kernel with the matrix product inside moves no logits, but needs tiles
for each GPU, and its products are slower than those of cuBLAS. Neither was measured on a GPU.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels_triton.device import ALIGNMENT

ROWS, COLUMNS = 8, 256  # a tile of products: 16 in each thread
LOWEST = tl.constexpr(-1e30)  # instead of -inf, because 0 * inf is NaN
# Triton would compile a kernel again for a micro-batch in which one of the numbers becomes 1 or a multiple of 16, or
# the address of one of the vectors becomes a multiple of 16.
_jit = partial(
    triton.jit,
    do_not_specialize=["tokens", "columns", "stride", "stride_d"],
    do_not_specialize_on_alignment=["bias", "targets", "lses", "entropies", "logits", "d_logprobs", "d_entropies"],
)


@triton.jit
def _rows(tokens, ROWS: tl.constexpr):
    """Return the tokens of this program, (ROWS,), and whether they exist. The last one stands for those beyond it."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return tl.minimum(rows, tokens - 1), rows < tokens


@triton.jit
def _logits(
    products,
    bias,
    rows,
    indices,
    columns,
    stride,
    inverse_temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Return z (ROWS, COLUMNS) of a tile of products; LOWEST beyond the last column."""
    exist = indices < columns
    z = tl.load(products + rows.to(tl.int64)[:, None] * stride + indices[None, :], mask=exist[None, :], other=0.0)
    if HAS_BIAS:
        z += tl.load(bias + indices, mask=exist, other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))  # tanh, without overflow
    z = z * inverse_temperature
    z = tl.where(z < LOWEST, LOWEST, z)  # a comparison lets NaN pass
    return tl.where(exist[None, :], z, LOWEST)


@_jit
def reduce_kernel(
    products,
    bias,
    targets,
    lses,
    entropies,
    logits,
    tokens,
    columns,
    stride,
    inverse_temperature,
    softcap,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Reduce rows of products: log-sum-exp, entropy, and the target's logit, 0 for a target outside of the block."""
    rows, exist = _rows(tokens, ROWS)
    target = tl.load(targets + rows)[:, None]
    m = tl.full((ROWS, COLUMNS), LOWEST, dtype=tl.float32)
    s = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    t = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    chosen = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        indices = start + tl.arange(0, COLUMNS)
        z = _logits(products, bias, rows, indices, columns, stride, inverse_temperature, softcap, HAS_BIAS, HAS_SOFTCAP)
        chosen += tl.where((indices[None, :] == target) & (indices < columns)[None, :], z, 0.0)
        above = tl.maximum(m, z)
        shrink = tl.exp(m - above)
        z -= above
        e = tl.exp(z)
        t = shrink * (t + s * (m - above)) + e * z
        s = shrink * s + e
        m = above
    highest = tl.max(m, 1)
    below = m - highest[:, None]
    shrink = tl.exp(below)
    total = tl.sum(shrink * s, 1)
    moment = tl.sum(shrink * (t + s * below), 1)
    tl.store(lses + rows, highest + tl.log(total), mask=exist)
    tl.store(entropies + rows, tl.log(total) - moment / total, mask=exist)
    tl.store(logits + rows, tl.sum(chosen, 1), mask=exist)


@_jit
def gradient_kernel(
    products,
    bias,
    targets,
    lses,
    entropies,
    d_logprobs,
    d_entropies,
    d_products,
    tokens,
    columns,
    stride,
    stride_d,
    inverse_temperature,
    softcap,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """Write the gradient of a tile of products."""
    rows, exist = _rows(tokens, ROWS)
    indices = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = _logits(products, bias, rows, indices, columns, stride, inverse_temperature, softcap, HAS_BIAS, HAS_SOFTCAP)
    logp = z - tl.load(lses + rows)[:, None]
    g = tl.load(d_logprobs + rows)[:, None]
    pull = g
    if HAS_ENTROPY:
        e = tl.load(d_entropies + rows)
        pull = logp * e[:, None] + (g + (e * tl.load(entropies + rows))[:, None])
    target = tl.load(targets + rows)[:, None]
    dz = tl.where(indices[None, :] == target, g, 0.0) - tl.exp(logp) * pull
    if HAS_SOFTCAP:
        bounded = z / (softcap * inverse_temperature)
        dz *= 1.0 - bounded * bounded
    dz = (dz * inverse_temperature).to(d_products.dtype.element_ty)
    out = d_products + rows.to(tl.int64)[:, None] * stride_d + indices[None, :]
    tl.store(out, dz, mask=exist[:, None] & (indices < columns)[None, :])


def constants(bias: Tensor | None, softcap: float | None) -> dict[str, Any]:
    """Return the constants and options that both kernels share."""
    return {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": softcap is not None,
        "num_warps": 4,
    }


def reduce_block(
    head: tuple[float, float | None], products: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `engine.kernels.token_logprobs.reduce_block`. head: its temperature and soft cap."""
    tokens, columns = products.shape
    temperature, softcap = head
    out = products.new_empty(3, tokens)
    if tokens:
        reduce_kernel[(triton.cdiv(tokens, ROWS),)](
            products,
            bias,
            targets,
            *out,
            tokens,
            columns,
            products.stride(0),
            1.0 / temperature,
            softcap or 0.0,
            **constants(bias, softcap),
        )
    return out[0], out[1], out[2]


def block_gradient(
    head: tuple[float, float | None],
    products: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `engine.kernels.token_logprobs.block_gradient`. head: its temperature and soft cap."""
    tokens, columns = products.shape
    temperature, softcap = head
    stride = -(-columns // ALIGNMENT) * ALIGNMENT
    d_products = products.new_empty(tokens, stride, dtype=dtype)[:, :columns]
    if tokens:
        gradient_kernel[(triton.cdiv(tokens, ROWS), triton.cdiv(columns, COLUMNS))](
            products,
            bias,
            targets,
            lse,
            entropy,
            d_logprobs.contiguous(),
            None if d_entropy is None else d_entropy.contiguous(),
            d_products,
            tokens,
            columns,
            products.stride(0),
            d_products.stride(0),
            1.0 / temperature,
            softcap or 0.0,
            HAS_ENTROPY=d_entropy is not None,
            **constants(bias, softcap),
        )
    return d_products
