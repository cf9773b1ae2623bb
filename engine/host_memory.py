"""Host memory: its size, settings of glibc's malloc, page-aligned buffers, and copies to the device.

PyTorch's CPU tensors come from malloc, and glibc returns large blocks to the system as soon as they are freed. The next
tensor of that size starts with pages that the kernel must zero. Blocks above 32 MiB are always mapped separately,
unless the number of mappings is limited to 0.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import psutil
import torch
from torch import Tensor

Pages = TypeVar("Pages", bound=mmap.mmap)

# Parameter numbers of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
LARGEST_FROM_HEAP = 2**25  # bytes, the maximum that glibc accepts
HEAP_RESERVE = 2**30  # free bytes at the end of the heap that are not returned
DEFAULT_MMAP_MAX = 2**16  # mappings
LARGEST_REUSED = 2**22  # bytes, after `return_freed_memory`
HUGE_PAGE = 2**21  # bytes
# Of a control group, in versions 2 and 1: its limit, its use, and the part of its use that the kernel can take back.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class HostMemory(NamedTuple):
    """The bytes of host memory that this process may use, and those that are available now."""

    total: int
    available: int


def host_memory(system: Path = Path("/")) -> HostMemory:
    """Return the host memory of this process: that of the machine, or less in a container or a job of Slurm.

    The control groups of Linux limit both. `system` is the root of the file system.
    """
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _group_limits(system):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total, available)


def _group_limits(system: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used bytes) of each control group of this process that limits memory, and of its parents."""
    membership, mounted = system / "proc/self/cgroup", system / "sys/fs/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        is_second = not controllers
        if not is_second and "memory" not in controllers.split(","):
            continue
        root = mounted if is_second else mounted / "memory"
        limit, use, inactive = _GROUP_FILES[0 if is_second else 1]
        own = root / path.lstrip("/")  # in a container, this folder may be missing: its own group is then the root
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # no such file, or "max"
                bound, used = int((group / limit).read_text()), int((group / use).read_text())
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield bound, used - int(statistics.get(inactive, 0))
            if group == root:
                break


def reuse_freed_memory() -> None:
    """Make this process reuse freed blocks instead of returning them to the system.

    Does nothing without glibc, or if the user has set a MALLOC_* environment variable.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, HEAP_RESERVE)


def return_freed_memory() -> None:
    """Return free memory to the system now, and from now on blocks of 4 MiB and more that fit into no free block.

    Offload to NVMe needs this: reused blocks would double the peak of a host.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_REUSED)
        library.mallopt(_MMAP_MAX, DEFAULT_MMAP_MAX)
        library.malloc_trim(0)


def page_aligned(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros (elements,) in host memory, on huge pages if they fill one. A page is resident after a write."""
    return torch.frombuffer(_map(mmap.mmap, elements * dtype.itemsize), dtype=dtype)[:elements]


def allocate(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes on a device; on a CPU on huge pages, which two cores read a third faster."""
    if device.type == "cpu":
        return page_aligned(size, torch.uint8)
    return torch.empty(size, dtype=torch.uint8, device=device)


def pinned(elements: int, dtype: torch.dtype) -> Tensor:
    """Return zeros (elements,) in pinned host memory. Do not free it while a copy from or to a GPU is pending.

    PyTorch's own pinned memory has a power of two of bytes: up to twice as many. Raises ValueError if the driver pins
    no more.
    """
    pages = _map(_PinnedPages, elements * dtype.itemsize)
    pages.madvise(mmap.MADV_DONTFORK)  # after a fork, a write would move the page away from the GPU's copies
    memory, runtime = torch.frombuffer(pages, dtype=dtype), cast("Any", torch.cuda.cudart())
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError as error:
        raise ValueError(
            f"offload needs {memory.nbytes / 2**30:.2f} GiB more of pinned host memory, which the driver refuses "
            f"({error}). WSL 2 pins about 1 GiB. Set offload_optimizer=none, offload_parameters=none and "
            "park_optimizer=false"
        ) from error
    pages.unpin = partial(runtime.cudaHostUnregister, memory.data_ptr())
    return memory[:elements]


class _PinnedPages(mmap.mmap):
    """Pages that are pinned until no tensor uses them."""

    unpin: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def _map(kind: type[Pages], size: int) -> Pages:
    """Map at least one page of anonymous memory."""
    size = max(size, mmap.PAGESIZE)
    pages = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE_PAGE:
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on `device`. A GPU copies it from pinned memory while the host continues."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def upload(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return integers as a tensor on the device, without waiting for the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)
