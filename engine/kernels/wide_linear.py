"""Products of large fp32 matrices on processors on which MKL holds back.

MKL, which PyTorch multiplies fp32 matrices with, uses AVX-512 on Intel's processors only; on others that have it, half
of each vector lies idle (AMD EPYC with AVX-512, one core: 65 to 87 GFLOP/s, where oneDNN does 110 to 200). oneDNN asks
for the instructions, not for the maker, but PyTorch calls it for fp32 through one operator alone, which is used here.

Nothing else changes: the same fp32 products, summed in another order. Small ones stay with MKL, since oneDNN makes
code for each new shape, which takes half a millisecond and more.
"""

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

LEAST = 2**28  # operations of a product


@cache
def holds_back() -> bool:
    """Whether this is a processor with AVX-512 that isn't Intel's, and PyTorch has both libraries."""
    if platform.machine() != "x86_64" or not torch.backends.mkl.is_available():
        return False
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and torch.backends.cpu.get_cpu_capability() == "AVX512" and _maker() != "GenuineIntel"


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether `wide_product(a, b)` pays, for plain matrices (m, k) and (k, n)."""
    alike = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    plain = type(a) in (Tensor, nn.Parameter) and type(b) in (Tensor, nn.Parameter)
    return alike and plain and 2 * a.shape[0] * a.shape[1] * b.shape[1] >= LEAST and holds_back()


def wide_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (k, n) + bias (n,), without gradients."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, bias, "none", [], "")
    return out


class Linear(nn.Linear):
    """nn.Linear, whose large products in fp32 are made here."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
        if torch.compiler.is_compiling() or not serves(rows, self.weight.T):
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = _Linear.apply(rows, self.weight, self.bias)
        return out.view(*x.shape[:-1], -1)


def widen_linears(module: nn.Module) -> None:
    """Let the linear layers of a module multiply by these products, where that pays on this machine."""
    for layer in module.modules():
        if type(layer) is nn.Linear and holds_back():
            layer.__class__ = Linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight.T, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            wide_product(upstream, weight) if wants_x else None,
            wide_product(upstream.T, x) if wants_weight else None,
            upstream.sum(0) if wants_bias else None,
        )


def _maker() -> str:
    """As the processor calls it; nothing where the system doesn't tell."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
