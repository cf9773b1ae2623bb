"""Running out of memory: recognise the error, and find the micro-batch size that fits.

A pass that runs out of memory is not repeated in place: while one rank fails, the others wait inside a collective.
`PassOutOfMemory` ends the process instead, and whoever starts processes starts them again with smaller micro-batches.
An update does not depend on the micro-batch size, so the result stays the same. Before the first step,
`find_micro_batch_size` looks for the size that fits; on a single rank it does so without a restart.
"""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from engine.parallel import dist

__all__ = ["PassOutOfMemory", "find_micro_batch_size", "is_out_of_memory"]

T = TypeVar("T")
# Messages of plain RuntimeErrors: torch's host allocator; CUDA and Triton outside of torch's own allocator; cuBLAS. The
# first backward pass creates a handle of cuBLAS for its thread, when activations may fill the memory.
MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
)


class PassOutOfMemory(MemoryError):
    """A forward or backward pass over micro-batches ran out of memory.

    `holds_graphs` is True if the graphs of all micro-batches of a step were held (`Engine.score_to_learn`): smaller
    micro-batches do not reduce that memory.
    """

    def __init__(self, reason: str, *, holds_graphs: bool = False) -> None:
        super().__init__(reason)
        self.holds_graphs = holds_graphs


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of the device or of the host means that no memory is left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.distributed.DistError):  # the process group cannot be used any more
        return False
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def find_micro_batch_size(dry_run: Callable[[int], None], tokens: int, *, minimum: int) -> int:
    """Return the first of `tokens`, `tokens` / 2, ... (at least `minimum`) whose dry run does not run out of memory.

    `dry_run` runs forward and backward of the largest micro-batch of so many tokens. Raises PassOutOfMemory if
    `minimum` tokens do not fit either, and on several ranks already after the first failure.
    """
    while True:
        try:
            dry_run(tokens)
        except PassOutOfMemory:
            if dist.world().size > 1 or tokens <= minimum:
                raise
        else:
            free_memory()  # NCCL and CUDA graphs allocate outside of PyTorch's allocator
            return tokens
        free_memory()  # outside the handler: the traceback holds the activations
        tokens = max(minimum, tokens // 2)


def free_memory() -> None:
    """Free what only reference cycles hold (autograd graphs with hooks), and return free blocks to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
