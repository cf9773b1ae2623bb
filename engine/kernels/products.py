"""Matrix products of bf16 and fp16 whose results are fp32, as log-probabilities need them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.kernels.wide_linear import serves, wide_product
from engine.kernels_cpu import products as host


class Products:
    """Products of hidden states and weight in fp32, whatever their precision.

    A plain product of bf16 matrices rounds its result to bf16, which moves log-probabilities by percents. CUDA has
    products that keep their fp32 accumulators. So has a kernel in C on CPUs that multiply bf16 without AMX; on others
    oneDNN is told to compute a product of fp32 matrices in bf16, exact for inputs that were bf16 (measured with AMX:
    3.4 x as fast as plain fp32, half as fast as bf16, and as close to float64 as fp32). fp16 on the CPU computes in
    fp32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        same = hidden.dtype == weight.dtype != torch.float32
        self._narrow = hidden.dtype if same and hidden.is_cuda else None
        self._rounds = same and weight.dtype == torch.bfloat16 and hidden.device.type == "cpu"
        self._in_c = self._rounds and hidden.shape[1] % 2 == 0 and host.takes(torch.bfloat16)

    @property
    def dtype(self) -> torch.dtype:
        """That of products whose results may be rounded."""
        return torch.bfloat16 if self._rounds else self._narrow or torch.float32

    def operand(self, matrix: Tensor) -> Tensor:
        """A matrix as products take it, to be made once for several of them."""
        return matrix if self._narrow is not None or self._in_c else matrix.float()

    def __call__(self, a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
        """a @ b of operands, fp32; on the CPU in `room`, where it is given."""
        if self._narrow is not None:
            return torch.mm(a, b, out_dtype=torch.float32)
        if self._in_c:
            return host.product(a, b, out=room)
        if not self._rounds:
            return product_of(a, b, room)
        with _bf16_products():
            return torch.mm(a, b, out=room)


def product_of(a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
    """a @ b in their own precision, by what is fastest here; in `room` where it is given."""
    return wide_product(a, b, out=room) if serves(a, b) else torch.mm(a, b, out=room)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, once."""
    products = Products(a, b)
    return products(products.operand(a), products.operand(b))


@contextmanager
def _bf16_products() -> Iterator[None]:
    """Let oneDNN round the inputs of fp32 matrix products to bf16. A setting of the process, put back at once."""
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
