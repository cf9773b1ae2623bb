"""Products of fp32 matrices on processors on which MKL holds back.

MKL, which PyTorch multiplies fp32 matrices with, uses AVX-512 on Intel's processors only; on others that have it, half
of each vector lies idle (AMD EPYC with AVX-512, one core: 105 GFLOP/s of 256). A kernel in C takes its place there
(`engine/kernels_cpu/products.py`). Where it can't be compiled, oneDNN does for large products: it asks for the
instructions, not for the maker, but makes code for each new shape, which takes half a millisecond and more, and PyTorch
calls it for fp32 through one operator alone, which is used here.

Nothing else changes: the same fp32 products, summed in another order.
"""

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from engine.kernels_cpu import products

LEAST = {"c": 2**22, "onednn": 2**28}  # operations of a product


@cache
def holds_back() -> bool:
    """Whether this is a processor with AVX-512 that isn't Intel's, and something is there that does better."""
    if platform.machine() != "x86_64" or not torch.backends.mkl.is_available():
        return False
    better = products.takes(torch.float32) or _has_operator()
    return better and torch.backends.cpu.get_cpu_capability() == "AVX512" and _maker() != "GenuineIntel"


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether `wide_product(a, b)` pays, for plain matrices (m, k) and (k, n)."""
    alike = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    plain = type(a) in (Tensor, nn.Parameter) and type(b) in (Tensor, nn.Parameter)
    return alike and plain and 2 * a.shape[0] * a.shape[1] * b.shape[1] >= _least() and holds_back()


def wide_product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (k, n) + bias (n,), in `out` where it is given, without gradients."""
    if products.takes(torch.float32):
        return products.product(a, b, bias, out)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, bias, "none", [], "")
    return found if out is None else out.copy_(found)


class Linear(nn.Linear):
    """nn.Linear, whose large products in fp32 are made here."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
        if torch.compiler.is_compiling() or not serves(rows, self.weight.T):
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = _Linear.apply(rows, self.weight, self.bias)
        return out.view(*x.shape[:-1], -1)


def widen_linears(module: nn.Module) -> None:
    """Let the linear layers of a module multiply so, where that pays on this machine."""
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


def _least() -> int:
    return LEAST["c" if products.takes(torch.float32) else "onednn"]


def _has_operator() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _maker() -> str:
    """As the processor calls it; nothing where the system doesn't tell."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
