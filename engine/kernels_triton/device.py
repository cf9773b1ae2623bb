"""What the kernels need to know about a GPU: whether Triton can compile for it, its shared memory, its processors.

PyTorch's CUDA builds for Linux bring Triton. Triton compiles a kernel at its first launch. It needs a C compiler,
Python's headers and a GPU that it supports. `has_triton` compiles one small kernel, so a missing compiler is found
before the first step and not in the middle of one. This file does not import Triton.
"""

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

log = logging.getLogger(__name__)
CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Card:
    """What tiles are chosen by: the compute capability (86 is 8.6), and bytes of shared memory a program may have."""

    capability: int
    shared: int


H200 = Card(90, 227 * 1024)


def card(device: torch.device) -> Card:
    """The device's; an H200's on a CPU, for Triton's interpreter."""
    return _card(device.index or 0) if device.type == "cuda" else H200


@cache
def _card(index: int) -> Card:
    about: Any = torch.cuda.get_device_properties(index)  # PyTorch's own stub leaves some of it out
    return Card(about.major * 10 + about.minor, about.shared_memory_per_block_optin)


def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, one each. 4 on a CPU, where Triton's interpreter runs them in turn."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 4


@cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot treats fp32: as torch.set_float32_matmul_precision says, so that kernels follow the same switch."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


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
    sampling = import_module("engine.kernels_triton.sample")
    logits = torch.zeros(1, 16, device="cuda")
    sampling.sample(logits, logits[:, 0], temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
