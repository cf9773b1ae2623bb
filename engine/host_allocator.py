"""Host memory between operators.

PyTorch's CPU tensors come from malloc, and glibc hands large blocks back to the system as soon as they are freed: the
next tensor of that size begins with pages that the kernel zeroes one by one.
"""

import ctypes
import os
import sys

# Numbers of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGEST_FROM_HEAP = 2**25  # bytes; glibc takes no more
KEPT = 2**30  # bytes free at the heap's end before they go back


def keep_freed_memory() -> None:
    """Let this process reuse freed blocks instead of giving them back. Nothing where malloc is not glibc's.

    A user's own MALLOC_... settings stand.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        mallopt(_TRIM_THRESHOLD, KEPT)
