"""Scratch files for the NVMe tiers, read and written with direct I/O (O_DIRECT) by a few threads.

A direct transfer moves data between the disk and the caller's memory without a copy in the page cache. Addresses,
offsets and sizes must be whole blocks of 4096 bytes. A file system without direct I/O goes through the page cache.

A scratch file has its full size from the start, so a full disk is an error before training. Its name is removed right
after opening: the system frees the space when the process ends for any reason.
"""

import errno
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.parallel import dist

BLOCK_BYTES = 4096
REQUEST_BYTES = 8 * 2**20
THREADS = 4
HUGE_PAGE_BYTES = 2**21

log = logging.getLogger(__name__)


def aligned(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros in host memory that starts at a page, as direct I/O needs. Pages are resident after a write."""
    size = max(elements * dtype.itemsize, BLOCK_BYTES)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE_PAGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)[:elements]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@cache
def io_threads() -> ThreadPoolExecutor:
    """Return the threads that serve all scratch files of this process."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="offload")


class ScratchFile:
    """A nameless file of `size` bytes on the disk of `folder` (None: the temporary folder)."""

    def __init__(self, folder: str | None, size: int) -> None:
        """Raises OSError if the folder is not writable or the disk is full."""
        self.folder = Path(folder or tempfile.gettempdir())
        self.size = 0
        self.descriptor = _open_nameless(self.folder)
        self.grow(size)

    def grow(self, size: int) -> None:
        """Reserve disk space up to `size` bytes. Raises OSError if the disk is full."""
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if size <= self.size:
            return
        try:
            os.posix_fallocate(self.descriptor, self.size, size - self.size)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise OSError(
                error.errno,
                f"nvme_path={self.folder} has no room for {size / 2**30:.1f} GiB of offloaded states: "
                f"{free / 2**30:.1f} GiB are free ({error.strerror}). Set nvme_path to a folder on a larger disk",
            ) from error
        self.size = size

    def read(self, target: Tensor, offset: int) -> list["Future[None]"]:
        """Start to fill `target` (contiguous) from byte `offset`. The futures raise OSError if a read fails."""
        return [io_threads().submit(self._transfer, os.preadv, *request) for request in _requests(target, offset)]

    def write(self, source: Tensor, offset: int) -> list["Future[None]"]:
        """Start to write `source` (contiguous) at byte `offset`. It must not change until all futures are done."""
        return [io_threads().submit(self._transfer, os.pwritev, *request) for request in _requests(source, offset)]

    def map(self) -> tuple[Tensor, mmap.mmap]:
        """Return all bytes of the file as a uint8 tensor, and the memory mapping behind it."""
        pages = mmap.mmap(self.descriptor, self.size)
        return torch.frombuffer(pages, dtype=torch.uint8), pages

    def close(self) -> None:
        """Close the file; the system frees its disk space."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()

    def _transfer(self, call: Callable[[int, Sequence[memoryview], int], int], view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                moved = call(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"offload file in {self.folder}: {error.strerror}") from error
            if moved == 0:
                raise OSError(errno.EIO, f"offload file in {self.folder} was truncated at byte {offset + done}")
            done += moved


def create_on_all_ranks(folder: str | None, size: int) -> ScratchFile:
    """Create a scratch file on each rank. Raises OSError on all ranks if one rank fails. Every rank calls."""
    file: ScratchFile | None = None
    problem: OSError | None = None
    try:
        file = ScratchFile(folder, size)
    except OSError as error:
        problem = error
    for rank, message in enumerate(dist.gather_objects(str(problem) if problem else None)):
        if message:
            raise problem or OSError(errno.ENOSPC, f"rank {rank}: {message}")
    assert file is not None
    return file


def wait(futures: Iterable["Future[None]"]) -> None:
    """Wait for all transfers, then raise the first OSError among them."""
    errors = [error for future in list(futures) if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _open_nameless(folder: Path) -> int:
    try:
        descriptor, path = tempfile.mkstemp(prefix="zerochat-", dir=folder)
    except OSError as error:
        raise OSError(
            error.errno, f"nvme_path={folder}: cannot create a file ({error.strerror}). Set nvme_path to another folder"
        ) from error
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
        _warn_without_direct_io(folder)
        return descriptor
    finally:
        os.unlink(path)
    os.close(descriptor)
    return direct


@cache
def _warn_without_direct_io(folder: Path) -> None:
    log.warning("the file system of %s has no direct I/O: offloaded states go through the page cache, slower", folder)


def _requests(tensor: Tensor, offset: int) -> Iterator[tuple[memoryview, int]]:
    view = bytes_of(tensor)
    for start in range(0, len(view), REQUEST_BYTES):
        yield view[start : start + REQUEST_BYTES], offset + start
