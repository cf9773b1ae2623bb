"""Kernels: one public name each, which picks the implementation.

Triton serves CUDA tensors where it can compile (`gpu`), a function in C some of the CPU's where that can be (`host`),
torch everything else, under the same signature; the torch functions, each in a file with the kernel's name, say what
the names mean and are what the others are tested against. Triton is imported when a CUDA tensor first comes along.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from engine.kernels.decode_attention import decode_attention as _decode_attention
from engine.kernels.sample import sample
from engine.kernels.token_logprobs import VocabularyShard, token_logprobs
from engine.kernels.varlen import varlen_fits, varlen_kernel, within_sequences
from engine.kernels_cpu import decode_attention as _host_decode_attention
from engine.kernels_cpu.ragged_attention import Families, ragged_attention
from engine.kernels_triton.device import has_triton

__all__ = [
    "Families",
    "VocabularyShard",
    "decode_attention",
    "ragged_attention",
    "sample",
    "token_logprobs",
    "varlen_fits",
    "varlen_kernel",
    "within_sequences",
]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_IN_TRITON = {name: name for name in ("decode_attention",)}
_HOST: dict[str, Any] = {"decode_attention": _host_decode_attention}


def _picked(plain: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function for the device of the first tensor that it is given; signature and meaning are the torch one's."""
    name = plain.__name__

    @wraps(plain)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        first: Any = args[0] if args else next(iter(kwargs.values()))
        chosen: Callable[Given, Result] = _for_device(name, first) or plain
        return chosen(*args, **kwargs)

    return call


def _for_device(name: str, tensor: Tensor) -> Callable[..., Any] | None:
    """What serves a tensor better than torch's operators; None where nothing does."""
    if tensor.is_cuda and name in _IN_TRITON and has_triton():
        return _triton(_IN_TRITON[name], name)
    if name in _HOST and tensor.device.type == "cpu" and tensor.dtype in _HOST[name].DTYPES and _HOST[name].available():
        function: Callable[..., Any] = getattr(_HOST[name], name)
        return function
    return None


@cache
def _triton(kernel: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"engine.kernels_triton.{kernel}"), name)
    return function


decode_attention = _picked(_decode_attention)
