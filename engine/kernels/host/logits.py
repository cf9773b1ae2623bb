"""Passes over a block of logits on CPUs, one each where PyTorch's operators take six: binds `logits.c`.

engine/kernels/token_logprobs.py has the formulas, and the operators that serve where there is no compiler.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.kernels.host.library import library, team

_SUMS: list[Any] = [ctypes.c_void_p, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 3, ctypes.c_int]
_SLOPES: list[Any] = [*[ctypes.c_void_p] * 7, *[ctypes.c_long] * 2, ctypes.c_int]


def serves(z: Tensor) -> bool:
    """Whether logits like these are passed over here."""
    return z.device.type == "cpu" and z.dtype == torch.float32 and z.is_contiguous() and library("logits") is not None


def sums(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of z (N, block): the highest logit, and the sums of w and of w (z - highest), w = e^(z - highest)."""
    highest, weights, pulls = (z.new_empty(len(z)) for _ in range(3))
    found: Any = library("logits")
    function = found.logit_sums
    function.argtypes, function.restype = _SUMS, None
    places = (tensor.data_ptr() for tensor in (highest, weights, pulls))
    function(z.data_ptr(), *z.shape, *places, team(z.numel()))
    return highest, weights, pulls


def slopes(
    z: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, of_logprob: Tensor, of_entropy: Tensor | None, out: Tensor
) -> Tensor:
    """The gradient of z (N, block) in `out`, from those of log-probabilities and entropies (N,); `targets` (N,) count
    from the block's first column and may lie outside of it.
    """
    rows = [targets, *(tensor.contiguous() for tensor in (lse, entropy, of_logprob))]
    turns = None if of_entropy is None else of_entropy.contiguous()
    found: Any = library("logits")
    function = found.logit_slopes
    function.argtypes, function.restype = _SLOPES, None
    places = [tensor.data_ptr() for tensor in (z, *rows)]
    function(*places, None if turns is None else turns.data_ptr(), out.data_ptr(), *z.shape, team(z.numel()))
    return out
