"""Large pages under tensors on the host.

Memory that is passed through once a step, or handed to a disk, costs the system one entry for 2 MiB instead of 512:
a direct write takes a third of a processor's time, and its disk is not waited for in between.
"""

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.host_allocator import KEPT

PAGE_BYTES = 2**21
GAP_BYTES = 4096  # between two blocks of one allocator, at most


def ask_for_large_pages(tensors: Iterable[Tensor]) -> None:
    """Before anything is written into them. Tensors that lie side by side may share a page; none reaches beyond them.

    A wish: nothing where the system knows no large pages, nothing for what has pages already.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    madvise = _madvise()
    if advice is None or madvise is None:
        return
    here = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes]
    for start, stop in _runs((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in here):
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        if first < last:
            madvise(first, last - first, advice)


def prepare_large_pages(size: int) -> None:
    """Ask for them under the next `size` bytes that malloc takes from its heap, before it writes between two blocks.

    Where it has written, a page stays small: with tensors of a page or two that is every third one. For as much as
    malloc keeps when it is freed.
    """
    ask_for_large_pages([torch.empty(min(size, KEPT - PAGE_BYTES), dtype=torch.uint8)])


def _runs(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """From where to where there is a tensor, with no more than a gap between."""
    runs: list[tuple[int, int]] = []
    for start, stop in sorted(places):
        if runs and start - runs[-1][1] <= GAP_BYTES:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    return runs


@cache
def _madvise() -> Any:
    """The system's function; None where there is none."""
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found
