"""Root mean square norm (Zhang & Sennrich, 2019, arXiv:1910.07467) on CPUs without gradients: binds `rms_norm.c`.

    y = (shift + weight) x / sqrt(mean(x^2) + eps)

shift is 0 (Llama) or 1 (Gemma). Transformers computes the norm in six operators, each of which reads and writes all
rows. In a decode step of a small model they take a tenth of the time.

`rms_norm_of` finds a module that computes this formula by its parameter and its numbers, not by its name.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels_cpu.library import library

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}  # relative; roundings of two orders of the same operations
NUMBERS_PER_THREAD = 2**16  # fewer numbers are not worth a thread
EPS_ATTRIBUTES = ("variance_epsilon", "eps", "norm_eps")


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Return the norm of x (..., size) with weight (size,), both bf16 or both fp32. No gradient."""
    x = x.contiguous()
    y = torch.empty_like(x)
    count, size = x.numel(), weight.shape[0]
    threads = max(1, min(torch.get_num_threads(), count // NUMBERS_PER_THREAD))
    half = x.dtype == torch.bfloat16
    _function()(x.data_ptr(), weight.data_ptr(), y.data_ptr(), count // size, size, eps, shift, half, threads)
    return y


@torch.no_grad()
def rms_norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return `rms_norm` with the weight of a module that computes this norm; None for any other module.

    The module is called with random numbers. The function reads the weight in place.
    """
    parameters, eps = list(module.parameters()), [getattr(module, name, None) for name in EPS_ATTRIBUTES]
    known = [value for value in eps if isinstance(value, float)]
    if len(parameters) != 1 or parameters[0].ndim != 1 or len(known) != 1 or list(module.children()):
        return None
    weight = parameters[0].detach()
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or library("rms_norm") is None:
        return None
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([[1e-2], [1e-1], [1.0], [10.0]])).to(weight.dtype)
    expected = module(x)
    for shift in (0.0, 1.0):
        if expected.dtype == x.dtype and _is_close(rms_norm(x, weight, known[0], shift), expected):

            def norm(hidden: Tensor, shift: float = shift) -> Tensor:
                same_dtype = hidden.dtype is weight.dtype
                out: Tensor = rms_norm(hidden, weight, known[0], shift) if same_dtype else module(hidden)
                return out

            return norm
    return None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    scale = expected.float().abs().amax(-1, keepdim=True)
    return bool(((found.float() - expected.float()).abs() <= TOLERANCE[found.dtype] * scale).all())


@cache
def _function() -> Any:
    compiled = library("rms_norm")
    assert compiled is not None
    pointer, size, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    compiled.rms_norm.argtypes = [pointer, pointer, pointer, size, size, number, number, flag, flag]
    compiled.rms_norm.restype = None
    return compiled.rms_norm
