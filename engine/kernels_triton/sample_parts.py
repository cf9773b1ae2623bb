"""What the kernels of `sample` share: a row's random number, tiles of logits, floats as integers in their order."""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)  # neighbouring logits of which the highest is kept
# Weights of e^-104 and less are 0 in fp32; log-probabilities of tokens so unlikely never matter.
DEPTH = tl.constexpr(104.0)
NOWHERE = tl.constexpr(2**30)


@triton.jit
def _mixed(x):
    """splitmix64 of uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(state, streams, positions, row):
    """The row's number in [0, 1) fp32."""
    stream = tl.load(streams + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    bits = _mixed(_mixed(stream + state.to(tl.uint64)) + position)
    return (bits >> 40).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def tile_of(logits, start, vocabulary, inverse_temperature, TILE: tl.constexpr):
    """z (TILE,) fp32 of a row from `start` on, -inf beyond the vocabulary."""
    places = start + tl.arange(0, TILE)
    z = tl.load(logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
    return z * inverse_temperature


@triton.jit
def groups_above(
    logits,
    groups,
    row,
    tile,
    tiles,
    vocabulary,
    stride,
    inverse_temperature,
    bound,
    TILE: tl.constexpr,
):
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
def key_of(z):
    """int32 in the order of fp32 `z`; both zeros are one."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The fp32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
