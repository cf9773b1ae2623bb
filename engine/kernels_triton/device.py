"""The GPU as the kernels see it: whether Triton can compile for it, its shared memory, its multiprocessors.

PyTorch's CUDA builds for Linux bring Triton. Triton compiles a kernel at its first launch. It needs a C compiler,
Python's headers and a GPU that it supports. `has_triton` compiles one small kernel, so a missing compiler is found
before the first step and not in the middle of one. This file does not import Triton.
"""

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

log = logging.getLogger(__name__)
CAPABILITY = (8, 0)
ALIGNMENT = 16  # columns; products of rows that begin at other columns are slower on GPUs


def shared_memory_and_multiprocessors(device: torch.device) -> tuple[int, int]:
    """Return the bytes of shared memory of a program, and the number of multiprocessors."""
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's stub lacks some of its fields
    return properties.shared_memory_per_block_optin, properties.multi_processor_count


def dot_precision(dtype: torch.dtype) -> str:
    """Return the input precision of tl.dot, which follows PyTorch's setting for products of fp32 on a GPU."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@cache
def has_triton() -> bool:
    """Return whether one small kernel compiles and runs on the current device; log the reason once if it does not."""
    reason = _missing_requirement()
    if reason is not None:
        log.warning("Triton's kernels are not used (%s): PyTorch's operators serve, with more time and memory", reason)
    return reason is None


def _missing_requirement() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return "the kernels need compute capability 8.0"
    try:
        _try()
    except torch.OutOfMemoryError:  # the compiler may still work
        raise
    except Exception as problem:  # the compiler, the linker and the driver raise errors of any type
        message = " ".join(str(problem).split()) or type(problem).__name__
        message = message if len(message) <= 200 else f"{message[:200]}..."
        return f"{message}; it wants a C compiler and Python's headers, on Debian: apt install gcc python3-dev"
    return None


def _try() -> None:
    sampling = import_module("engine.kernels_triton.sample")
    logits = torch.zeros(1, 16, device="cuda")
    sampling.sample(logits, logits[:, 0], temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
