"""`write_tokens` in Triton: keys and values of a decode step in one launch, for GPUs.

A few kilobytes: what is saved is a launch a layer. PyTorch's indexed writes take one each for keys and values.
"""

import triton
import triton.language as tl
from torch import Tensor


def write_tokens(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
    """As `engine.kernels.write_tokens.write_tokens`."""
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
        **launch_options(width, of_values),
    )


def launch_options(width: int, of_values: int) -> dict[str, int]:
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
