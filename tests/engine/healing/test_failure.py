"""Which errors say that there is no memory left, in the words of those who say it."""

import pytest
import torch

from engine.healing import is_out_of_memory

SAID = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("out of memory while one sequence is decoded"),
    torch.distributed.DistBackendError("NCCL error: unhandled cuda error 'out of memory'"),
]


@pytest.mark.parametrize("error", SAID, ids=str)
def test_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_something_else_went_wrong(error: BaseException) -> None:
    assert not is_out_of_memory(error)
