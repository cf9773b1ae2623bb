"""`take_rows` and `note_rows` in Triton: the same functions as in engine/kernels/decode_rows.py, in one launch each.

They move a few kilobytes: what is saved is launches, 22 in each decode step.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import decode_rows
from engine.kernels.decode_rows import Said, Told

BLOCK = 128
WIDTH = tl.constexpr(len(decode_rows.COLUMNS))
TOKEN, CACHED, STREAM, DRAWN, LIMIT, ENDED, PROMPT, SHARED = (tl.constexpr(column) for column in decode_rows.COLUMNS)
NOTHING = tl.constexpr(decode_rows.NOTHING)


def take_rows(rows: Tensor, slots: Tensor, place: Tensor) -> Told:
    """As `engine.kernels.decode_rows.take_rows`."""
    batch = len(slots)
    told = rows.new_empty(len(Told._fields), batch)
    take_kernel[(triton.cdiv(batch, BLOCK),)](rows, slots, place, told, batch, BLOCK=BLOCK, num_warps=4)
    return Told(*told)


def note_rows(
    rows: Tensor, slots: Tensor, tokens: Tensor, logprobs: Tensor, ends: Tensor, said: Said, seen: Tensor | None = None
) -> None:
    """As `engine.kernels.decode_rows.note_rows`."""
    batch = len(slots)
    note_kernel[(triton.cdiv(batch, BLOCK),)](
        rows,
        slots,
        tokens,
        logprobs,
        ends,
        *said,
        seen,
        batch,
        len(ends),
        said.tokens.shape[1],
        0 if seen is None else seen.shape[1],
        HAS_SEEN=seen is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["batch"])
def take_kernel(rows, slots, place, told, batch, BLOCK: tl.constexpr):
    """Told (8, B), in the order of `Told`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < batch
    at = rows + tl.load(slots + row, mask=there, other=0) * WIDTH
    cached = tl.load(at + CACHED, mask=there, other=0)
    shared = tl.load(at + SHARED, mask=there, other=0)
    live = tl.load(at + ENDED, mask=there, other=1) == 0
    tl.store(told + row, tl.load(at + TOKEN, mask=there, other=0), mask=there)
    tl.store(told + batch + row, cached, mask=there)
    tl.store(told + 2 * batch + row, tl.where(live, cached + 1, 0), mask=there)
    tl.store(told + 3 * batch + row, cached - shared, mask=there)
    tl.store(told + 4 * batch + row, tl.load(at + PROMPT, mask=there, other=0), mask=there)
    tl.store(told + 5 * batch + row, shared, mask=there)
    tl.store(told + 6 * batch + row, tl.load(at + STREAM, mask=there, other=0), mask=there)
    tl.store(told + 7 * batch + row, tl.load(at + DRAWN, mask=there, other=0), mask=there)
    if tl.program_id(0) == 0:
        tl.store(place, tl.load(place) + 1)


@triton.jit(do_not_specialize=["batch"])
def note_kernel(
    rows,
    slots,
    tokens,
    logprobs,
    ends,
    said,
    said_logprobs,
    place,
    seen,
    batch,
    count,
    slots_said,
    vocabulary,
    HAS_SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of the table each; columns that stay are not touched."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < batch
    slot = tl.load(slots + row, mask=there, other=0)
    at = rows + slot * WIDTH
    live = tl.load(at + ENDED, mask=there, other=1) == 0
    token = tl.load(tokens + row, mask=there, other=0)
    drawn = tl.load(at + DRAWN, mask=there, other=0) + live.to(tl.int64)
    over = (drawn >= tl.load(at + LIMIT, mask=there, other=0)) | (live == 0)
    for end in range(count):
        over = over | (token == tl.load(ends + end))
    cached = tl.load(at + CACHED, mask=there, other=0) + live.to(tl.int64)
    tl.store(at + TOKEN, token, mask=there)
    tl.store(at + CACHED, cached, mask=there)
    tl.store(at + DRAWN, drawn, mask=there)
    tl.store(at + ENDED, over.to(tl.int64), mask=there)
    here = tl.load(place) * slots_said + slot
    tl.store(said + here, tl.where(live, token, NOTHING), mask=there)
    tl.store(said_logprobs + here, tl.load(logprobs + row, mask=there, other=0.0), mask=there)
    if HAS_SEEN:
        tl.store(seen + slot * vocabulary + token, there, mask=there)


def write_tokens(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
    """As `engine.kernels.decode_rows.write_tokens`."""
    (batch, heads, width), of_values = key.shape, value.shape[-1]
    assert key.stride(-1) == value.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    if batch == 0:
        return
    write_kernel[(batch * heads,)](
        key,
        value,
        keys,
        values,
        slots,
        positions,
        heads,
        width,
        of_values,
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        slots.stride(0),
        positions.stride(0),
        **write_options(width, of_values),
    )


def write_options(width: int, of_values: int) -> dict[str, int]:
    """Tile sizes: powers of two over the head sizes."""
    return {"BD": triton.next_power_of_2(width), "BV": triton.next_power_of_2(of_values), "num_warps": 1}


@triton.jit
def write_kernel(
    key,
    value,
    keys,
    values,
    slots,
    positions,
    heads,
    width,
    of_values,
    stride_kb,
    stride_kn,
    stride_vb,
    stride_vn,
    stride_ks,
    stride_kh,
    stride_kt,
    stride_vs,
    stride_vh,
    stride_vt,
    of_slots,
    of_positions,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """One head of one sequence."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)  # a slot of a million tokens has more numbers than 2^31
    slot = tl.load(slots + row * of_slots).to(tl.int64)
    position = tl.load(positions + row * of_positions).to(tl.int64)
    d = tl.arange(0, BD)
    new = tl.load(key + row * stride_kb + head * stride_kn + d, mask=d < width)
    tl.store(keys + slot * stride_ks + head * stride_kh + position * stride_kt + d, new, mask=d < width)
    dv = tl.arange(0, BV)
    new = tl.load(value + row * stride_vb + head * stride_vn + dv, mask=dv < of_values)
    tl.store(values + slot * stride_vs + head * stride_vh + position * stride_vt + dv, new, mask=dv < of_values)
