"""Files read and written in aligned blocks past the page cache (O_DIRECT), through it where the system refuses.

A direct transfer copies nothing and takes hardly any of a processor's time: the disk reads and writes the caller's own
memory. Address, place and size must be whole blocks; whatever is not goes through the page cache.
"""

import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

BLOCK_BYTES = 4096
NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP)
Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv or os.pwritev

log = logging.getLogger(__name__)


def aligned(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Host memory that begins on a page, as direct I/O wants it; zeros, not resident before they are written."""
    size = max(elements * dtype.itemsize, BLOCK_BYTES)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2**21:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)[:elements]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def whole_bytes(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class BlockFile:
    """A file that is open for reading and writing. `what` names it where something goes wrong."""

    def __init__(self, path: str | os.PathLike[str], flags: int = os.O_RDWR, *, what: str) -> None:
        """Raises OSError."""
        self.folder, self.what = Path(path).parent, what
        self._refused = False  # the system said no to a direct transfer
        self._plain = os.open(path, flags, 0o600)
        self._direct = self._plain
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                os.close(self._plain)
                self._plain = self._direct = -1
                raise
            _tell(self.folder)

    def transfer(self, move: Move, view: memoryview, offset: int) -> None:
        """Read or write all of `view` at byte `offset`. Raises OSError, also for a file that ends too early."""
        done = 0
        while done < len(view):
            rest = view[done:]
            direct = not self._refused and not (_address(rest) | (offset + done) | len(rest)) % BLOCK_BYTES
            descriptor = self._direct if direct else self._plain
            try:
                moved = move(descriptor, [rest], offset + done)
            except OSError as error:
                if direct and error.errno in NOT_OFFERED and self._direct != self._plain:
                    self._refused = True
                    _tell(self.folder)
                    continue
                raise OSError(error.errno, f"{self.what}: {error.strerror}") from error
            if moved == 0:
                raise OSError(errno.EIO, f"{self.what} ends at byte {offset + done}, too early")
            done += moved

    def to_disk(self) -> None:
        """Until what was written is on the disk."""
        os.fsync(self._plain)

    def close(self) -> None:
        """Give it back."""
        for descriptor in {self._plain, self._direct} - {-1}:
            os.close(descriptor)
        self._plain = self._direct = -1

    def __del__(self) -> None:
        if hasattr(self, "_direct"):
            self.close()


@cache
def _tell(folder: Path) -> None:
    log.warning("%s takes no direct I/O; files there go through the page cache, slower", folder)


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
