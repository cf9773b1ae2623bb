"""Host memory between operators.

PyTorch's CPU tensors come from malloc, and glibc hands large blocks back to the system as soon as they are freed: the
next tensor of that size begins with pages that the kernel zeroes one by one. Blocks above 32 MiB it maps by themselves
whatever the threshold says, unless it may map none (a PPO update of OPT-125M in bf16: 95,000 page faults
less, 5 % of its time, and no more memory at its height).
"""

import ctypes
import os
import sys

# Numbers of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
LARGEST_FROM_HEAP = 2**25  # bytes; glibc takes no more
KEPT = 2**30  # bytes free at the heap's end before they go back
MAPPED_AT_ONCE = 2**16  # blocks; glibc's own figure
LARGEST_KEPT = 2**22  # bytes, where memory is to go back


def keep_freed_memory() -> None:
    """Let this process reuse freed blocks instead of giving them back. Nothing where malloc is not glibc's.

    A user's own MALLOC_... settings stand.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, KEPT)


def give_memory_back() -> None:
    """Return what is free, and from now on freed blocks of 4 MiB and more at once.

    For what is tight: kept blocks double what a host holds on which gathers and gradients come and go.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(_MMAP_MAX, MAPPED_AT_ONCE)
        library.malloc_trim(0)
