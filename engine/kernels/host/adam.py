"""Adam and AdamW in C: scaling the gradient, the step, and the cast to 16 bits in one pass over memory.

Kingma & Ba, 2015, arXiv:1412.6980; Loshchilov & Hutter, 2019, arXiv:1711.05101. Numbers are rounded where
`torch.optim`'s fused classes round them, so that their vectors give the same bits; the last few numbers of a tensor,
which torch steps one by one in double precision, may differ in the last bit. It moves 30 bytes a parameter where the
gradient is fp32 and 28 where it is bf16. Left out: amsgrad, maximize, fp16.
"""

import ctypes
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels.host.library import library, team

GRADIENTS = (torch.float32, torch.bfloat16)
TARGETS = (torch.bfloat16,)


class _Call(ctypes.Structure):
    """`struct call` of the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parameter", "mean", "square", "gradient", "target")),
        ("count", ctypes.c_int64),
        *(
            (name, ctypes.c_float)
            for name in (
                "scale",
                "kept",
                "coupled",
                "mean_share",
                "mean_of_new",
                "square_kept",
                "square_share",
                "root",
                "eps",
                "rate",
            )
        ),
        ("half", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


@cache
def available() -> bool:
    """Whether the kernel is here."""
    found = library("adam", exact=True)
    if found is not None:
        found.adam.argtypes, found.adam.restype = [ctypes.POINTER(_Call)], None
    return found is not None


def serves(gradient: Tensor, target: Tensor | None) -> bool:
    """Whether it is here and takes tensors like these."""
    return available() and gradient.dtype in GRADIENTS and (target is None or target.dtype in TARGETS)


def adam(
    parameter: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    *,
    step: int,
    group: Mapping[str, Any],
    decoupled: bool,
    factor: float = 1.0,
    target: Tensor | None = None,
) -> None:
    """Step `step` (from 1) of a parameter and its two moments, fp32, by `factor` x `gradient`, fp32 or bf16.

    All have as many elements and are contiguous. `group` has lr, betas, eps and weight_decay as `torch.optim` names
    them; the decay is AdamW's where it is `decoupled`, else Adam's. `target` gets the new values in bf16.
    """
    tensors = [parameter, mean, square, gradient, *([] if target is None else [target])]
    assert all(t.is_contiguous() and t.numel() == parameter.numel() and t.device.type == "cpu" for t in tensors)
    assert {t.dtype for t in tensors[:3]} == {torch.float32} and serves(gradient, target), "ask serves() first"
    lr, (first, second), decay = group["lr"], group["betas"], group["weight_decay"]
    share = 1.0 - first
    late = share >= 0.5  # as torch's lerp, which keeps the larger part exact
    call = _Call(
        *(t.data_ptr() for t in tensors[:4]),
        None if target is None else target.data_ptr(),
        parameter.numel(),
        factor,
        1.0 - lr * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        share - 1.0 if late else share,
        late,
        second,
        1.0 - second,
        math.sqrt(1.0 - second**step),
        group["eps"],
        -lr / (1.0 - first**step),
        gradient.dtype == torch.bfloat16,
        team(parameter.numel()),
    )
    found = library("adam", exact=True)
    assert found is not None
    found.adam(call)
