"""Blockwise int8, as ZeRO++ sends weights and gradients (Wang et al., 2023, arXiv:2306.10209, sections 3.1 and 3.3).

    s = max |x| / 127 over a block        q = round(x / s)        x ~ s q,  |x - s q| <= s / 2

Encoded, `numbers` are one row of bytes: the blocks' scales in fp32, then an int8 a number, padded to 4 bytes. A block
with a number that is not finite is not finite after decoding, so that a bad gradient is still seen.
"""

import torch
from torch import Tensor

BLOCK = 256
_AT_ONCE = 512  # blocks worked on at once, so that what they become on the way stays in the cache


def row_bytes(numbers: int) -> int:
    """The bytes that `numbers` take when encoded."""
    return 4 * _blocks(numbers) + -(-numbers // 4) * 4


def encode(values: Tensor, row: Tensor) -> None:
    """Encode values (numbers,) of any float type into row (row_bytes,) uint8."""
    scales, codes = _parts(row, len(values))
    for first in range(0, len(scales), _AT_ONCE):
        part = values[first * BLOCK : (first + _AT_ONCE) * BLOCK]
        blocks = _in_blocks(part)  # (blocks, BLOCK) fp32
        scale = blocks.abs().amax(1).div_(127.0)
        scales[first : first + _AT_ONCE] = scale
        rounded = blocks.mul_(torch.where(scale > 0, 1.0 / scale, 0.0)[:, None]).round_()
        codes[first * BLOCK : first * BLOCK + len(part)] = rounded.view(-1)[: len(part)]


def decode(row: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Decode a row of bytes into out (numbers,) of any float type; with `add` on top of what stands there."""
    scales, codes = _parts(row, len(out))
    for first in range(0, len(scales), _AT_ONCE):
        part = out[first * BLOCK : (first + _AT_ONCE) * BLOCK]
        blocks = _in_blocks(codes[first * BLOCK : first * BLOCK + len(part)])
        found = blocks.mul_(scales[first : first + _AT_ONCE, None]).view(-1)[: len(part)]
        if add:
            part += found
        else:
            part.copy_(found)


def _blocks(numbers: int) -> int:
    return -(-numbers // BLOCK)


def _parts(row: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
    """Scales (blocks,) fp32 and codes (numbers,) int8 of a row, sharing its memory."""
    border = 4 * _blocks(numbers)
    return row[:border].view(torch.float32), row[border : border + numbers].view(torch.int8)


def _in_blocks(values: Tensor) -> Tensor:
    """(numbers,) -> (blocks, BLOCK) fp32, a copy, zeros at the end."""
    blocks = values.new_empty(_blocks(len(values)) * BLOCK, dtype=torch.float32)
    blocks[: len(values)] = values
    blocks[len(values) :] = 0.0
    return blocks.view(-1, BLOCK)
