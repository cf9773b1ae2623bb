"""Tensors one behind another into a file, all of it in whole blocks past the page cache.

Small ones, and the ends of large ones, are put together in memory and go to the disk a mebibyte at a time; what lies
between goes from where it is. A request costs Python and the system as much whatever its size, and a few bytes through
the page cache more than thousands past it.
"""

import os

import torch

from engine.checkpoint.sums import RunningSum, Sum
from engine.offload.blocks import BLOCK_BYTES, BlockFile, aligned, bytes_of

REQUEST_BYTES = 8 * 2**20  # whoever wants to change a tensor waits for one
DIRECT_BYTES = 2**18  # from here on a request of its own
STAGED_BYTES = 4 * DIRECT_BYTES
ALIGNED = 64  # bytes; numbers of any kind can be read from there


class Stream:
    """Writes a file from its beginning."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self._room = bytes_of(aligned(STAGED_BYTES, torch.uint8))
        self._written = 0  # bytes, whole blocks
        self._staged = 0  # bytes behind them
        self._sum = RunningSum()

    @property
    def end(self) -> int:
        """Where the next byte goes."""
        return self._written + self._staged

    def begin(self, address: int, size: int) -> int:
        """Where a tensor of `size` bytes will begin, the next to be written.

        A large one as far from the border of a block as in memory, so that all but its ends can go directly.
        """
        gap = (address - self.end) % BLOCK_BYTES if size >= DIRECT_BYTES else -self.end % ALIGNED
        while gap:
            gap -= self.write(memoryview(bytes(gap)))
        return self.end

    def write(self, view: memoryview) -> int:
        """Take some of the next bytes; returns how many. Raises OSError."""
        blocks, into = len(view) // BLOCK_BYTES * BLOCK_BYTES, self._staged % BLOCK_BYTES
        if blocks >= DIRECT_BYTES and not into:
            self._flush()
            return self._direct(view[: min(blocks, REQUEST_BYTES)])
        count = BLOCK_BYTES - into if blocks >= DIRECT_BYTES else min(len(view), STAGED_BYTES - self._staged)
        self._room[self._staged : self._staged + count] = view[:count]
        self._staged += count
        if self._staged == STAGED_BYTES:
            self._flush()
        return count

    def close(self) -> Sum:
        """All of it into the file, filled up to a whole block, to be read in whole blocks. What it is then."""
        rest = -self.end % BLOCK_BYTES
        if rest:
            self.write(memoryview(bytes(rest)))
        self._flush()
        return self._sum.value

    def _direct(self, view: memoryview) -> int:
        self._file.transfer(os.pwritev, view, self._written)
        self._sum.add(view)
        self._written += len(view)
        return len(view)

    def _flush(self) -> None:
        """What is staged, whole blocks."""
        staged, self._staged = self._staged, 0
        if staged:
            self._direct(self._room[:staged])
