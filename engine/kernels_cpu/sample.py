"""`engine.kernels.sample` in C for CPUs: binds `sample.c`.

Equal logits at the edge of top-k are kept in the order of the vocabulary. Left out: fp16.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engine.kernels_cpu.library import library

DTYPES = (torch.bfloat16, torch.float32)
BLOCK = 256  # of the C file
LOGITS_PER_THREAD = 2**15  # fewer logits are not worth a thread


def supports(logits: Tensor) -> bool:
    """Return whether the kernel can read these logits here."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and _function() is not None


def sample(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Compute `engine.kernels.sample` for logits that the kernel supports."""
    function = _function()
    assert function is not None and supports(logits)
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    uniforms = uniforms.to("cpu", torch.float32).contiguous()
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    threads = max(1, min(torch.get_num_threads(), logits.numel() // LOGITS_PER_THREAD, rows))
    room = torch.empty(threads, 3, -(-vocabulary // BLOCK) * BLOCK)
    function(
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        rows,
        vocabulary,
        logits.stride(0),
        uniforms.data_ptr(),
        temperature,
        top_k,
        top_p,
        min_p,
        tokens.data_ptr(),
        logprobs.data_ptr(),
        room.data_ptr(),
        threads,
    )
    return tokens, logprobs


@cache
def _function() -> Callable[..., None] | None:
    compiled = library("sample")
    if compiled is None:
        return None
    pointer, flag, size, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    compiled.sample.argtypes = [
        *(pointer, flag, size, size, size, pointer),
        *(number, size, number, number),
        *(pointer, pointer, pointer, flag),
    ]
    compiled.sample.restype = None
    function: Callable[..., None] = compiled.sample
    return function
