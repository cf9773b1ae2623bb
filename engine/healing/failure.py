"""Running out of memory: how it shows, and how what was being made is let go of."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
# What plain RuntimeErrors say: torch's host allocator; CUDA and Triton beside torch's own allocator; cuBLAS.
SAID = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """True for what a device or the host says when there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.distributed.DistError):  # its group can't be used any more
        return False
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID)


def attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of `work`, or why memory ran out in it; then nothing that it made is held any more."""
    try:
        return work(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
    # Behind the handler: the error's traceback held the frames, and they held the activations.
    let_go()
    return None, reason


def let_go() -> None:
    """Free what only cycles hold (autograd graphs with hooks), and give free blocks back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
