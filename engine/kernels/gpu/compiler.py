"""Whether Triton's kernels can be made on this machine.

PyTorch's CUDA builds for Linux bring Triton. It compiles at a kernel's first launch, and wants a C compiler and
Python's headers for that, and a GPU that it knows: what a machine lacks would else be known in the middle of a step.
"""

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

log = logging.getLogger(__name__)
CAPABILITY = (8, 0)


@cache
def has_triton() -> bool:
    """Tries one small kernel on the device in use. Where that fails PyTorch's operators serve, as the log says once."""
    reason = _what_is_lacking()
    if reason is not None:
        log.warning("Triton's kernels are not used (%s): PyTorch's operators serve, with more time and memory", reason)
    return reason is None


def _what_is_lacking() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return "it has tensor cores multiply from compute capability 8.0 on"
    try:
        _try()
    except torch.OutOfMemoryError:  # says nothing about the compiler
        raise
    except Exception as problem:  # a compiler's, a linker's, a driver's: of any type
        said = " ".join(str(problem).split()) or type(problem).__name__
        said = said if len(said) <= 200 else f"{said[:200]}..."
        return f"{said}; it wants a C compiler and Python's headers, on Debian: apt install gcc python3-dev"
    return None


def _try() -> None:
    writing = import_module("engine.kernels.gpu.write_tokens")
    row = torch.zeros(1, 1, 16, device="cuda")
    place = torch.zeros(1, dtype=torch.int64, device="cuda")
    writing.write_tokens(row, row, row[None].clone(), row[None].clone(), place, place)
