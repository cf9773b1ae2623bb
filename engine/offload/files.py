"""A private file of a run, read and written in aligned blocks by a few threads, past the page cache (O_DIRECT).

The file has its whole size from the start, so that a full disk is known at once, and loses its name as soon as it is
open: the system removes it with the process, however that ends. What a file can't give (a short read) is an OSError.
"""

import ctypes
import errno
import logging
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

BLOCK_BYTES = 4096
REQUEST_BYTES = 8 * 2**20
THREADS = 4
M_MMAP_THRESHOLD = -3  # malloc.h
NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)


def aligned(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Host memory that begins on a page, as direct I/O wants it; zeros, not resident before they are written."""
    size = max(elements * dtype.itemsize, BLOCK_BYTES)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2**21:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)[:elements]


def give_memory_back() -> None:
    """Have the C library return what is free, and from now on freed blocks of 4 MiB and more at once (glibc).

    It would keep blocks of up to 32 MiB, which doubles what a host holds on which gathers and gradients come and go.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, 4 * 2**20)
        library.malloc_trim(0)


@cache
def workers() -> ThreadPoolExecutor:
    """The threads of all files of this process."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="offload")


class PrivateFile:
    """`size` bytes under `folder` (None: the temporary folder) that nobody else sees and nothing is left of."""

    def __init__(self, folder: str | None, size: int) -> None:
        """Raises OSError where there is no room."""
        self.folder = Path(folder or tempfile.gettempdir())
        self.size = 0
        try:
            descriptor, path = tempfile.mkstemp(prefix="zerochat-", dir=self.folder)
        except OSError as error:
            raise OSError(error.errno, f"offload: no file can be made in {self.folder} ({error.strerror})") from error
        try:
            self._plain = descriptor
            direct = _open_direct(path)
            self._direct = _fall_back(descriptor, self.folder) if direct is None else direct
        finally:
            os.unlink(path)
        self.grow(size)

    def grow(self, size: int) -> None:
        """Make it `size` bytes long, all of them reserved. Raises OSError where there is no room."""
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
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
        return [
            workers().submit(self._transfer, os.preadv, view, place) for view, place in _requests(target, offset)
        ]

    def write(self, source: Tensor, offset: int) -> list["Future[None]"]:
        """Begin to write `source` (contiguous) at byte `offset`; it must not change before all futures are done."""
        return [
            workers().submit(self._transfer, os.pwritev, view, place) for view, place in _requests(source, offset)
        ]

    def _transfer(self, move: object, view: memoryview, offset: int) -> None:
        """One request, all of it. Whatever is not aligned goes through the page cache, which the system keeps true."""
        done = 0
        while done < len(view):
            rest = view[done:]
            direct = not (_address(rest) | (offset + done) | len(rest)) % BLOCK_BYTES
            descriptor = self._direct if direct else self._plain
            try:
                moved = move(descriptor, [rest], offset + done)  # type: ignore[operator]
            except OSError as error:
                if direct and error.errno in NOT_OFFERED and self._direct != self._plain:
                    self._direct = _fall_back(self._plain, self.folder)
                    continue
                raise OSError(error.errno, f"offload file in {self.folder}: {error.strerror}") from error
            if moved == 0:
                raise OSError(errno.EIO, f"offload file in {self.folder} ends at byte {offset + done}, too early")
            done += moved

    def mapping(self, offset: int, elements: int, dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
        """A tensor over a part of the file (`offset` at a block border), and the mapping it lives in."""
        pages = mmap.mmap(self._plain, max(elements * dtype.itemsize, 1), offset=offset)
        return torch.frombuffer(pages, dtype=dtype)[:elements], pages

    def forget(self, offset: int, size: int) -> None:
        """Let the system drop its cached copy of a part."""
        os.posix_fadvise(self._plain, offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the space back."""
        for descriptor in {self._plain, self._direct} - {-1}:
            os.close(descriptor)
        self._plain = self._direct = -1

    def __del__(self) -> None:
        if getattr(self, "_plain", -1) >= 0 and hasattr(self, "_direct"):
            self.close()


def settle(futures: list["Future[None]"]) -> None:
    """Wait for all; raises the first OSError among them, after the last has ended."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _open_direct(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        return None


@cache
def _tell(folder: Path) -> None:
    log.warning("offload: %s takes no direct I/O; its files go through the page cache, slower", folder)


def _fall_back(descriptor: int, folder: Path) -> int:
    _tell(folder)
    return descriptor


def _requests(tensor: Tensor, offset: int) -> Iterator[tuple[memoryview, int]]:
    """A tensor's bytes cut into requests, each with its place in the file."""
    view = memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(view), REQUEST_BYTES):
        yield view[start : start + REQUEST_BYTES], offset + start


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
