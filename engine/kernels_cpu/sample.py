"""`sample` in C: the same function as in engine/kernels/sample.py, for CPUs, in one call that sorts nothing.

bf16 and fp32. Ties at the edge of top-k go by index. A sum runs in the same order whatever the number of rows and
threads, so a token depends on its own row and number only. Left out: fp16.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engine.generation.sampling import Sampling, uniforms
from engine.kernels.sample import check
from engine.kernels_cpu.library import library

DTYPES = (torch.bfloat16, torch.float32)
BLOCK = 256  # of the C file
SHARE = 2**15  # logits that are worth a thread


def available() -> bool:
    """Whether the kernel is here."""
    return _function() is not None


def sample(logits: Tensor, streams: Tensor, positions: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """As `engine.kernels.sample.sample`."""
    check(logits, streams, positions)
    return draw(logits, how, uniforms(how.seed, streams, positions))


def draw(logits: Tensor, how: Sampling, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """As `engine.kernels.sample.draw`.

    Raises ValueError where the shapes don't fit.
    """
    if logits.ndim != 2 or not logits.shape[1] or numbers.shape != logits.shape[:1]:
        raise ValueError(f"logits (B, V), numbers (B,) do not fit: {tuple(logits.shape)}, {tuple(numbers.shape)}")
    function = _function()
    assert function is not None and logits.dtype in DTYPES and logits.device.type == "cpu"
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    numbers = numbers.to("cpu", torch.float32).contiguous()
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    threads = max(1, min(torch.get_num_threads(), logits.numel() // SHARE))
    stats = torch.empty(2 * rows * -(-vocabulary // BLOCK))
    filtered = how.temperature > 0 and (how.top_k > 0 or how.top_p < 1)
    candidates = torch.empty(3 * threads * (vocabulary + 1) if filtered else 0, dtype=torch.int32)
    function(
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        rows,
        vocabulary,
        logits.stride(0),
        numbers.data_ptr(),
        how.temperature,
        how.top_k,
        how.top_p,
        how.min_p,
        tokens.data_ptr(),
        logprobs.data_ptr(),
        stats.data_ptr(),
        candidates.data_ptr(),
        threads,
    )
    return tokens, logprobs


@cache
def _function() -> Callable[..., None] | None:
    found = library("sample")
    if found is None:
        return None
    pointer, flag, size, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    found.sample.argtypes = [
        pointer,
        flag,
        size,
        size,
        size,
        pointer,
        number,
        size,
        number,
        number,
        pointer,
        pointer,
        pointer,
        pointer,
        flag,
    ]
    found.sample.restype = None
    function: Callable[..., None] = found.sample
    return function
