"""Matrix products with fp32 sums, and linear layers in fp32, by the fastest implementation of this machine.

bf16 and fp16 (`products_of`). A plain product of bf16 matrices rounds its result to bf16, which changes
log-probabilities by percents. These products return fp32:

- CUDA products have fp32 accumulators and an fp32 output.
- On CPUs that multiply bf16 and are not Intel's, a C kernel computes them (`engine/kernels_cpu/products.c`). Intel's
  have AMX, or multiply bf16 more slowly than fp32 (measured without AMX: 81 of 157 GFLOP/s).
- On other CPUs oneDNN computes a product of fp32 matrices in bf16, which is exact for inputs that were bf16. Measured
  with AMX: 3.4 times the speed of fp32, half the speed of bf16, and as close to float64 as fp32.
- fp16 on a CPU is computed in fp32.

fp32 (`product_of`, `widen_linears`). PyTorch multiplies fp32 matrices with MKL, and MKL uses AVX-512 on Intel's
processors only. On other processors with AVX-512 (AMD EPYC, one core: 105 of 256 GFLOP/s) the C kernel replaces large
products. It adds the same terms in another order.
"""

import platform
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from engine.kernels_cpu import products as in_c
from engine.kernels_cpu.library import is_intel

MIN_OPERATIONS = 2**22  # MKL computes fp32 products with fewer operations than this


class Products(NamedTuple):
    """Products of hidden states and the rows of a weight.

    dtype: of products whose results may be rounded. operand_dtype: of the arguments of `multiply`, which returns a @ b
    in fp32.
    """

    dtype: torch.dtype
    operand_dtype: torch.dtype
    multiply: Callable[[Tensor, Tensor], Tensor]


def products_of(hidden: Tensor, weight: Tensor) -> Products:
    """Return the products for hidden states (N, D) and a weight (V, D), whatever the precision of both."""
    is_narrow = hidden.dtype == weight.dtype != torch.float32
    if is_narrow and hidden.is_cuda:
        return Products(hidden.dtype, hidden.dtype, partial(torch.mm, out_dtype=torch.float32))
    if not is_narrow or hidden.dtype != torch.bfloat16 or hidden.device.type != "cpu":
        return Products(torch.float32, torch.float32, product_of)
    if hidden.shape[1] % 2 == 0 and not is_intel() and in_c.supports(torch.bfloat16):
        return Products(torch.bfloat16, torch.bfloat16, in_c.product)
    return Products(torch.bfloat16, torch.float32, _rounding_product)


def product_of(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b in the precision of a and b, without gradients. Write the result to `out` if set."""
    return in_c.product(a, b, out=out) if uses_c(a, b) else torch.mm(a, b, out=out)


def _rounding_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of fp32 matrices, which oneDNN rounds to bf16.

    This changes a setting of the process and restores it at the end.
    """
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        return torch.mm(a, b)
    finally:
        setting.fp32_precision = before


@cache
def mkl_is_slow() -> bool:
    """Return whether MKL leaves the AVX-512 of this processor unused and the C kernel is available."""
    if platform.machine() != "x86_64" or not torch.backends.mkl.is_available():
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and not is_intel() and in_c.supports(torch.float32)


def uses_c(a: Tensor, b: Tensor) -> bool:
    """Return whether the C kernel multiplies the fp32 matrices (m, k) and (k, n) faster than MKL."""
    is_fp32 = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    is_plain = type(a) in (Tensor, nn.Parameter) and type(b) in (Tensor, nn.Parameter)
    return is_fp32 and is_plain and 2 * a.shape[0] * a.shape[1] * b.shape[1] >= MIN_OPERATIONS and mkl_is_slow()


class WideLinear(nn.Linear):
    """nn.Linear whose large fp32 products use the C kernel, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
        if torch.compiler.is_compiling() or not uses_c(rows, self.weight.T):
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = _WideLinear.apply(rows, self.weight, self.bias)
        return out.view(*x.shape[:-1], -1)


def widen_linears(module: nn.Module) -> None:
    """Make the linear layers of a module use the C kernel if MKL is slow on this processor."""
    for layer in module.modules():
        if type(layer) is nn.Linear and mkl_is_slow():
            layer.__class__ = WideLinear


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return in_c.product(x, weight.T, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            in_c.product(upstream, weight) if needs_x else None,
            in_c.product(upstream.T, x) if needs_weight else None,
            upstream.sum(0) if needs_bias else None,
        )
