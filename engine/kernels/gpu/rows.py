"""`norm_rows`, `turn_heads` and `gate_rows` in Triton (see rows.py): rows that a decode step carries, on GPUs.

The rows of a step are few and lie in the L2 cache; what is saved is the launches between the matrix products, of which
a norm spelled in operators takes up to eight and a turn of heads five. Numbers are rounded where the model's operators
round them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.host.gates import Kind as Activation
from engine.kernels.host.norms import MOST, Kind
from engine.kernels.ready import DTYPES, Ready

TILE = 1024  # numbers of a row that one program gates
RMS, LAYER = tl.constexpr(int(Kind.RMS)), tl.constexpr(int(Kind.LAYER))
SILU, GELU_TANH = tl.constexpr(int(Activation.SILU)), tl.constexpr(int(Activation.GELU_TANH))


def norm_rows(
    shape: Sequence[int], dtype: torch.dtype, *, parts: int, kind: Kind, eps: float, device: torch.device
) -> Ready:
    """As `engine.kernels.host.norms.norm_rows`."""
    assert dtype in DTYPES and shape[-1] <= MOST
    written = [torch.empty(*shape, dtype=dtype, device=device) for _ in range(2 if parts > 1 else 1)]
    rows, size = written[0].numel() // shape[-1], shape[-1]
    options = norm_options(size, parts, kind)

    def run(weight: Tensor, bias: Tensor | None, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> None:
        norm_kernel[(rows,)](x, y, z, written[0], weight, bias, written[-1], size, eps, **options)

    return run, written


def norm_options(size: int, parts: int, kind: Kind) -> dict[str, Any]:
    """Constants of `norm_kernel`: a row is one tile, eight numbers or so a thread."""
    tile = triton.next_power_of_2(size)
    return {"PARTS": parts, "KIND": int(kind), "TILE": tile, "num_warps": min(16, max(1, tile // 256))}


def turn_heads(
    tokens: int,
    heads: int,
    size: int,
    dtype: torch.dtype,
    *,
    turned: int,
    at: tuple[int, int, int],
    kind: Kind | None,
    eps: float,
    device: torch.device,
) -> Ready:
    """As `engine.kernels.host.rotary.turn_heads`."""
    assert dtype in DTYPES and turned <= size <= MOST
    written = torch.empty(tokens, heads, size, dtype=dtype, device=device)
    offset, token_stride, head_stride = at
    options = turn_options(size, turned, kind)

    def run(x: Tensor, cosines: Tensor, sines: Tensor, weight: Tensor | None = None) -> None:
        turn_kernel[(tokens * heads,)](
            x, cosines, sines, weight, written, heads, size, turned, offset, token_stride, head_stride, eps, **options
        )

    return run, [written]


def turn_options(size: int, turned: int, kind: Kind | None) -> dict[str, Any]:
    """Constants of `turn_kernel`: a head's halves lie in tiles of their own, as one is the other's partner."""
    return {
        "NORMED": kind is not None,
        "KIND": int(kind or 0),
        "REST": turned < size,
        "HALF": triton.next_power_of_2(max(1, turned // 2)),
        "WHOLE": triton.next_power_of_2(size),
        "num_warps": 1,
    }


def gate_rows(
    rows: int,
    size: int,
    dtype: torch.dtype,
    *,
    kind: Activation,
    gate: tuple[int, int],
    up: tuple[int, int] | None,
    device: torch.device,
) -> Ready:
    """As `engine.kernels.host.gates.gate_rows`."""
    assert dtype in DTYPES
    written = torch.empty(rows, size, dtype=dtype, device=device)
    (first, stride), (second, other) = gate, up or (0, 0)
    options = gate_options(kind, gated=up is not None)

    def run(x: Tensor, y: Tensor | None = None) -> None:
        grid = (rows, triton.cdiv(size, TILE))
        gate_kernel[grid](x, y, written, size, first, stride, second, other, **options)

    return run, [written]


def gate_options(kind: Activation, *, gated: bool) -> dict[str, Any]:
    """Constants of `gate_kernel`."""
    return {"KIND": int(kind), "GATED": gated, "TILE": TILE, "num_warps": 4}


@triton.jit
def norm_kernel(
    x, y, z, total, weight, bias, out, size, eps, PARTS: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr
):
    """One row (size,): x, or x + y, or x + y + z, which is kept in `total`, and its norm."""
    i = tl.arange(0, TILE)
    inside = i < size
    at = tl.program_id(0).to(tl.int64) * size + i
    of = out.dtype.element_ty
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:
        row = (row + tl.load(y + at, mask=inside, other=0.0).to(tl.float32)).to(of).to(tl.float32)
    if PARTS > 2:
        row = (row + tl.load(z + at, mask=inside, other=0.0).to(tl.float32)).to(of).to(tl.float32)
    if PARTS > 1:
        tl.store(total + at, row.to(of), mask=inside)
    if KIND == LAYER:
        row = tl.where(inside, row - tl.sum(row, 0) / size, 0.0)
    row = _normed(row, tl.load(weight + i, mask=inside, other=0.0).to(tl.float32), size, eps, KIND, of)
    if KIND == LAYER:
        row += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, row.to(of), mask=inside)


@triton.jit
def _normed(row, weight, size, eps, KIND: tl.constexpr, of: tl.constexpr):
    """Zeros beyond `size` change nothing. What is left to round is what a store rounds."""
    return _scaled(row, 1.0 / tl.sqrt_rn(tl.sum(row * row, 0) / size + eps), weight, KIND, of)


@triton.jit
def _scaled(row, scale, weight, KIND: tl.constexpr, of: tl.constexpr):
    row = row * scale
    if KIND == RMS:
        return row.to(of).to(tl.float32) * weight
    elif KIND == LAYER:
        return row * weight
    else:
        return row * (1.0 + weight)


@triton.jit
def turn_kernel(
    x,
    cosines,
    sines,
    weight,
    out,
    heads,
    size,
    turned,
    offset,
    token_stride,
    head_stride,
    eps,
    NORMED: tl.constexpr,
    KIND: tl.constexpr,
    REST: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One head (size,) of a token: normed, its first numbers turned, number i with number i + turned / 2."""
    token = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    x += offset + token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    out += tl.program_id(0).to(tl.int64) * size
    of = out.dtype.element_ty
    half = turned // 2
    i = tl.arange(0, HALF)
    inside = i < half
    first = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half + i, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if NORMED:
        whole = tl.arange(0, WHOLE)
        numbers = tl.load(x + whole, mask=whole < size, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(numbers * numbers, 0) / size + eps)
        by = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        first = _scaled(first, scale, by, KIND, of).to(of).to(tl.float32)
        by = tl.load(weight + half + i, mask=inside, other=0.0).to(tl.float32)
        second = _scaled(second, scale, by, KIND, of).to(of).to(tl.float32)
    at = token.to(tl.int64) * turned + i
    c = tl.load(cosines + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sines + at, mask=inside, other=0.0).to(tl.float32)
    low = (first * c).to(of).to(tl.float32) - (second * s).to(of).to(tl.float32)
    tl.store(out + i, low.to(of), mask=inside)
    c = tl.load(cosines + half + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sines + half + at, mask=inside, other=0.0).to(tl.float32)
    high = (second * c).to(of).to(tl.float32) + (first * s).to(of).to(tl.float32)
    tl.store(out + half + i, high.to(of), mask=inside)
    if REST:
        j = turned + tl.arange(0, WHOLE)
        rest = tl.load(x + j, mask=j < size, other=0.0).to(tl.float32)
        if NORMED:
            rest = _scaled(rest, scale, tl.load(weight + j, mask=j < size, other=0.0).to(tl.float32), KIND, of)
        tl.store(out + j, rest.to(of), mask=j < size)


@triton.jit
def gate_kernel(
    x, y, out, size, first, stride, second, other, KIND: tl.constexpr, GATED: tl.constexpr, TILE: tl.constexpr
):
    """A tile of one row: the activation of x, times y where that gates."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < size
    of = out.dtype.element_ty
    number = tl.load(x + first + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == SILU:
        made = number * _logistic(number)
    elif KIND == GELU_TANH:
        made = number * _logistic(2.0 * 0.7978845608028654 * (number + 0.044715 * number * number * number))
    else:
        made = _gelu_by_steps(number, of)
    if GATED:
        up = tl.load(y + second + row * other + i, mask=inside, other=0.0).to(tl.float32)
        made = made.to(of).to(tl.float32) * up
    tl.store(out + row * size + i, made.to(of), mask=inside)


@triton.jit
def _logistic(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def _gelu_by_steps(x, of: tl.constexpr):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) by single operators, as GPT-2 spells it: each rounds."""
    cubed = ((x * x).to(of).to(tl.float32) * x).to(of).to(tl.float32)
    inner = (x + (cubed * 0.044715).to(of).to(tl.float32)).to(of).to(tl.float32)
    inner = (inner * 0.7978845608028654).to(of).to(tl.float32)
    e = tl.exp(-2.0 * tl.abs(inner))
    tangent = tl.where(inner < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    above = (tangent.to(of).to(tl.float32) + 1.0).to(of).to(tl.float32)
    return (x * 0.5).to(of).to(tl.float32) * above
