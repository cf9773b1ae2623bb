"""Linear layers on CPUs with weights prepared for products of few rows.

A product of a few rows with a large matrix takes as long as reading the matrix. PyTorch's linear packs the matrix again
in each call. `PrepackedLinears` replaces the forward of each linear layer by one of two products, which read weights at
up to twice the speed. Our kernel (`engine/kernels_cpu/linear.py`) reads bf16 weights in place. oneDNN packs the other
weights: fp32, and bf16 on processors with AMX. The choice depends on the precision and the processor, never on a
measurement, so a machine gives the same numbers in each run.

A packed weight is a copy, which `refresh` renews after a change of the weight. With bf16 and up to 32 rows the packed
product is PyTorch's own bit for bit; with more rows it rounds sums in another order. Our kernel copies only weights
that are stored transposed (GPT-2's).

Left out: expert matrices, which are not linear layers, and quantized weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.kernels_cpu import linear

# The number of rows for which oneDNN chooses its layout. With bf16 the layout for one row is also faster with more
# rows: a step of OPT-125M with 16 rows took 27.1 ms, and 34.5 ms in the layout for 16.
LAYOUT_ROWS = {torch.bfloat16: 1, torch.float32: 16}
# PyTorch computes smaller layers, for which the call of another product costs more time than it saves.
MIN_NUMEL = {torch.bfloat16: 1 << 14, torch.float32: 1 << 18}
MAX_FP32_ROWS = 256  # with more rows PyTorch's own product is as fast

Product = Callable[[Tensor], Tensor]


class _OneDNNLinear:
    """A copy of a weight (out, in) in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.mkldnn
        self._product = ops._linear_pointwise
        self._weight = ops._reorder_linear_weight(weight.contiguous(), LAYOUT_ROWS[weight.dtype])
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product


class PrepackedLinears:
    """The linear layers of a module on the CPU; inside `applied` they compute with prepared weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._products: dict[nn.Module, Product] = {}

    def refresh(self) -> None:
        """Prepare the weights of all layers, one at a time, so that a new copy can reuse the memory of the old one."""
        for layer in list(self._products or _eligible(self.module)):
            self._products.pop(layer, None)  # free first: new memory costs more than packing
            self._products[layer] = _prepare(layer)

    def release(self) -> None:
        """Free the copies. The next use creates them again."""
        self._products.clear()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the module's linear layers compute with prepared weights inside the context."""
        if not self._products:
            self.refresh()
        for layer, product in self._products.items():
            layer.__dict__["forward"] = product
        try:
            yield
        finally:
            for layer in self._products:
                del layer.__dict__["forward"]

    @property
    def bytes(self) -> int:
        """The bytes of the copies."""
        weights = (_weight(layer) for layer in self._products)
        return sum(w.nbytes for w in weights if not (linear.serves(w) and w.is_contiguous()))

    def __len__(self) -> int:
        """Return how many layers are prepared."""
        return len(self._products)


def is_available(dtype: torch.dtype) -> bool:
    """Return whether weights of `dtype` can be prepared on this machine."""
    return not copies_weights(dtype) or _onednn_packs(dtype)


def copies_weights(dtype: torch.dtype) -> bool:
    """Return whether preparing weights of `dtype` copies them; otherwise they are read in place."""
    return dtype != torch.bfloat16 or linear.method() == linear.Method.NONE


def _prepare(layer: nn.Module) -> Product:
    weight, bias = _weight(layer), _bias(layer)
    if linear.serves(weight):
        return linear.LinearRows(weight.contiguous(), bias)
    packed = _OneDNNLinear(weight, bias)
    if weight.dtype != torch.float32:
        return packed
    plain = type(layer).forward

    def product(x: Tensor) -> Tensor:
        is_small = x.numel() // x.shape[-1] <= MAX_FP32_ROWS
        return packed(x) if is_small else plain(layer, x)

    return product


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Return whether this PyTorch can pack and multiply weights of `dtype` here. The operators are not public."""
    ops: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or dtype not in MIN_NUMEL:
        return False
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or bool(ops._is_mkldnn_bf16_supported())


def _eligible(module: nn.Module) -> Iterator[nn.Module]:
    for layer in module.modules():
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
            continue
        weight = _weight(layer)
        is_large = weight.device.type == "cpu" and weight.numel() >= MIN_NUMEL.get(weight.dtype, 1 << 62)
        if is_large and (linear.serves(weight) or _onednn_packs(weight.dtype)):
            yield layer


def _weight(layer: nn.Module) -> Tensor:
    """Return the weight as (out, in)."""
    weight: Tensor = layer.weight.detach()  # type: ignore[union-attr, operator, assignment]
    return weight.t() if isinstance(layer, Conv1D) else weight


def _bias(layer: nn.Module) -> Tensor | None:
    bias: Any = layer.bias
    return None if bias is None else bias.detach()
