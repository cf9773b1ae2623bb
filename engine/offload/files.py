"""A private file of a run, read and written in aligned blocks by a few threads.

The file has its whole size from the start, so that a full disk is known at once, and loses its name as soon as it is
open: the system removes it with the process, however that ends. What a file can't give (a short read) is an OSError.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.offload.blocks import BlockFile, bytes_of, whole_bytes

REQUEST_BYTES = 8 * 2**20
THREADS = 4


@cache
def workers() -> ThreadPoolExecutor:
    """The threads of all files of this process."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="offload")


class PrivateFile(BlockFile):
    """`size` bytes under `folder` (None: the temporary folder) that nobody else sees and nothing is left of."""

    def __init__(self, folder: str | None, size: int) -> None:
        """Raises OSError where there is no room."""
        place = Path(folder or tempfile.gettempdir())
        self.size = 0
        try:
            descriptor, path = tempfile.mkstemp(prefix="zerochat-", dir=place)
        except OSError as error:
            raise OSError(error.errno, f"offload: no file can be made in {place} ({error.strerror})") from error
        os.close(descriptor)
        try:
            super().__init__(path, what=f"offload file in {place}")
        finally:
            os.unlink(path)
        self.grow(size)

    def grow(self, size: int) -> None:
        """Make it `size` bytes long, all of them reserved. Raises OSError where there is no room."""
        size = whole_bytes(size)
        if size <= self.size:
            return
        try:
            os.posix_fallocate(self._plain, self.size, size - self.size)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise OSError(
                error.errno,
                f"offload: {self.folder} has no room for {size / 2**30:.1f} GiB ({free / 2**30:.1f} GiB free, "
                f"{error.strerror}); name another folder (nvme_path)",
            ) from error
        self.size = size

    def read(self, target: Tensor, offset: int) -> list["Future[None]"]:
        """Begin to fill `target` (contiguous) from byte `offset`; done when all futures are, with their OSError."""
        return [workers().submit(self.transfer, os.preadv, view, place) for view, place in _requests(target, offset)]

    def write(self, source: Tensor, offset: int) -> list["Future[None]"]:
        """Begin to write `source` (contiguous) at byte `offset`; it must not change before all futures are done."""
        return [workers().submit(self.transfer, os.pwritev, view, place) for view, place in _requests(source, offset)]

    def mapping(self, offset: int, elements: int, dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
        """A tensor over a part of the file (`offset` at a block border), and the mapping it lives in."""
        pages = mmap.mmap(self._plain, max(elements * dtype.itemsize, 1), offset=offset)
        return torch.frombuffer(pages, dtype=dtype)[:elements], pages

    def forget(self, offset: int, size: int) -> None:
        """Let the system drop its cached copy of a part."""
        os.posix_fadvise(self._plain, offset, size, os.POSIX_FADV_DONTNEED)


def settle(futures: list["Future[None]"]) -> None:
    """Wait for all; raises the first OSError among them, after the last has ended."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _requests(tensor: Tensor, offset: int) -> Iterator[tuple[memoryview, int]]:
    """A tensor's bytes cut into requests, each with its place in the file."""
    view = bytes_of(tensor)
    for start in range(0, len(view), REQUEST_BYTES):
        yield view[start : start + REQUEST_BYTES], offset + start
