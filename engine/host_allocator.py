"""The settings of glibc's malloc for training on a CPU.

PyTorch's CPU tensors come from malloc, and glibc returns large blocks to the system as soon as they are freed. The next
tensor of that size starts with pages that the kernel must zero. Blocks above 32 MiB are always mapped separately,
unless the number of mappings is limited to 0.
"""

import ctypes
import os
import sys

# Parameter numbers of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
LARGEST_FROM_HEAP = 2**25  # bytes, the maximum that glibc accepts
HEAP_RESERVE = 2**30  # free bytes at the end of the heap that are not returned
DEFAULT_MMAP_MAX = 2**16  # mappings
LARGEST_REUSED = 2**22  # bytes, after `return_freed_memory`


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
    """Return free memory to the system now, and freed blocks of 4 MiB and more from now on.

    Used if memory is scarce (offload to NVMe): reused blocks would double the peak of a host.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_REUSED)
        library.mallopt(_MMAP_MAX, DEFAULT_MMAP_MAX)
        library.malloc_trim(0)
