"""Scratch files of the NVMe tiers: nameless files, mapped into memory as tensors, with direct I/O for long passes.

A mapped page is read at its first use, and the kernel writes changed pages back. `read_ahead` and `release` tell the
kernel which pages are used next, and which are not. Direct I/O (O_DIRECT) moves data between the disk and a buffer
without a copy in the page cache. A pass over states that do not fit in memory is several times as fast by direct I/O.

A scratch file has its full size from the start, so a full disk is an error before training. Its name is removed right
after opening: the system frees the space when the process ends for any reason.
"""

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine.parallel import dist

THREADS = 4


@cache
def io_threads() -> ThreadPoolExecutor:
    """Return the threads that serve all scratch files of this process."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="offload")


class ScratchFile:
    """A file on the disk of `folder` (None: the temporary folder). `bytes` is its content, a mapped uint8 tensor."""

    def __init__(self, folder: str | None, size: int) -> None:
        """Reserve `size` bytes of disk space on each rank. Every rank calls.

        Raises OSError on all ranks if the folder of one rank is not writable or its disk is full.
        """
        self.folder = Path(folder or tempfile.gettempdir())
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = -1
        problem: OSError | None = None
        try:
            self._open()
        except OSError as error:
            problem = error
        for rank, message in enumerate(dist.gather_objects(str(problem) if problem else None)):
            if message:
                raise problem or OSError(errno.ENOSPC, f"rank {rank}: {message}")
        self._pages = mmap.mmap(self.descriptor, self.size)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._flush: Future[None] | None = None

    def read(self, target: Tensor, offset: int) -> None:
        """Fill `target`, which starts at a page, from byte `offset` by direct I/O. Raises OSError."""
        self._transfer(os.preadv, target, offset)

    def write(self, source: Tensor, offset: int) -> None:
        """Write `source`, which starts at a page, at byte `offset` by direct I/O. Raises OSError."""
        self._transfer(os.pwritev, source, offset)

    def read_ahead(self, start: int, stop: int) -> None:
        """Start to read the mapped bytes `start` (a multiple of the page size) to `stop`."""
        if start < stop:
            self._pages.madvise(mmap.MADV_WILLNEED, start, stop - start)

    def release(self, start: int, stop: int) -> None:
        """Release the memory of the mapped bytes `start` (a multiple of the page size) to `stop`."""
        if start < stop:
            self._pages.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def start_flush(self) -> None:
        """Start to write changed pages to the disk. Raises OSError if the last flush failed."""
        flush, self._flush = self._flush, None
        if flush is not None:
            flush.result()
        self._flush = io_threads().submit(getattr(os, "fdatasync", os.fsync), self.descriptor)

    def _open(self) -> None:
        try:
            self.descriptor, path = tempfile.mkstemp(prefix="zerochat-", dir=self.folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"nvme_path={self.folder}: cannot create a file ({error.strerror}). Set nvme_path to another folder",
            ) from error
        with suppress(OSError, AttributeError):  # without direct I/O (macOS, file systems), the page cache serves
            direct = os.open(path, os.O_RDWR | os.O_DIRECT)
            os.close(self.descriptor)
            self.descriptor = direct
        os.unlink(path)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, self.size)
            os.ftruncate(self.descriptor, self.size)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise OSError(
                error.errno,
                f"nvme_path={self.folder} has no room for {self.size / 2**30:.1f} GiB of offloaded states: "
                f"{free / 2**30:.1f} GiB are free ({error.strerror}). Set nvme_path to a folder on a larger disk",
            ) from error

    def _transfer(self, call: Callable[[int, Sequence[memoryview], int], int], tensor: Tensor, offset: int) -> None:
        view, done = memoryview(tensor.view(torch.uint8).numpy()), 0  # type: ignore[arg-type]
        while done < len(view):
            try:
                moved = call(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"offload file in {self.folder}: {error.strerror}") from error
            if moved == 0:
                raise OSError(errno.EIO, f"offload file in {self.folder} ends at byte {offset + done}")
            done += moved

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
