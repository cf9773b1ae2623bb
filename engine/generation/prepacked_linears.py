"""Linear layers and RMS norms on CPUs, prepared for forwards of few rows.

A product of a few rows with a large matrix takes as long as reading the matrix. PyTorch's linear packs the matrix again
in each call. `PrepackedLinears` replaces the forward of each linear layer by one of two products, which read weights at
up to twice the speed. Our kernel (`engine/kernels_cpu/linear.c`) reads bf16 weights in place. oneDNN packs the other
weights: fp32, and bf16 on processors with AMX. The choice depends on the precision and the processor, never on a
measurement, so a machine gives the same numbers in each run.

A packed weight is a copy, which `refresh` renews after a change of the weight. With bf16 and up to 32 rows the packed
product is PyTorch's own bit for bit; with more rows it rounds sums in another order. Our kernel copies only weights
that are stored transposed (GPT-2's).

PyTorch computes an RMS norm in six operators. In bf16, `engine/kernels_cpu/norm.c` replaces them: a step of the demo's
model is 10 to 24 % faster, and one of Qwen3-0.6B 5 % (2026-11-28, AMD EPYC with AVX512_BF16).

Left out: expert matrices, which are not linear layers, and quantized weights.
"""

import ctypes
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.generation.weight_sync import aligned_bytes, divide_memory
from engine.host_memory import HUGE_PAGE, allocate, host_memory
from engine.internals import has_onednn, pack_linear
from engine.kernels_cpu.library import library

# The number of rows for which oneDNN chooses its layout. With bf16 the layout for one row is also faster with more
# rows: a step of OPT-125M with 16 rows took 27.1 ms, and 34.5 ms in the layout for 16.
LAYOUT_ROWS = {torch.bfloat16: 1, torch.float32: 16}
# PyTorch computes smaller layers, for which the call of another product costs more time than it saves.
MIN_NUMEL = {torch.bfloat16: 1 << 14, torch.float32: 1 << 16}
MIN_OUTPUTS = 16  # the fewest outputs of a matrix: TILE in linear.c
_LINEAR_ARGUMENTS: list[Any] = [*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 3, ctypes.c_int]
_NORM_ARGUMENTS: list[Any] = [*[ctypes.c_void_p] * 3, *[ctypes.c_long] * 2, ctypes.c_float, ctypes.c_int]

Product = Callable[[Tensor], Tensor]


@cache
def has_in_place_kernel() -> bool:
    """Return whether linear.c is faster than PyTorch here: there is a compiler, and the processor has no AMX."""
    compiled = library("linear")
    return compiled is not None and bool(compiled.has_kernel())


def in_place_kernel_supports(weight: Tensor) -> bool:
    """Return whether `LinearRows` supports this matrix (out, in) on this machine."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and len(weight) >= MIN_OUTPUTS
        and has_in_place_kernel()
    )


class LinearRows:
    """A linear layer without gradients: x (..., in) bf16 -> (..., out) bf16.

    weight: (out, in) bf16, contiguous. bias: (out,) bf16, or None. Each call reads both in place.
    Raises ValueError if x has another dtype or size.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        assert in_place_kernel_supports(weight) and weight.is_contiguous()
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous())
        compiled = library("linear")
        assert compiled is not None
        self._function: Any = compiled.linear_rows
        self._function.argtypes, self._function.restype = _LINEAR_ARGUMENTS, None
        self._tensors = weight, bias  # a reference, so that the memory is not freed
        self._pointers = weight.data_ptr(), None if bias is None else bias.data_ptr()
        self.outs, self.ins = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.ins:
            raise ValueError(f"x must be bf16 with rows of {self.ins} numbers, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outs)
        rows, threads = x.numel() // self.ins, torch.get_num_threads()
        self._function(*self._pointers, x.data_ptr(), y.data_ptr(), rows, self.ins, self.outs, threads)
        return y


class NormRows:
    """An RMS norm without gradients: x (..., size) bf16 -> (..., size) bf16. It reads the weight (size,) in place."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        compiled = library("norm")
        assert compiled is not None and weight.is_contiguous()
        self._function: Any = compiled.rms_norm
        self._function.argtypes, self._function.restype = _NORM_ARGUMENTS, None
        self._weight, self._address = weight, weight.data_ptr()  # a reference, so that the memory is not freed
        self._size, self._eps = len(weight), eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows. Raises ValueError if x has another dtype or size."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self._size:
            raise ValueError(f"x must be bf16 with rows of {self._size} numbers, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        y, rows, threads = torch.empty_like(x), x.numel() // self._size, torch.get_num_threads()
        self._function(x.data_ptr(), self._address, y.data_ptr(), rows, self._size, self._eps, threads)
        return y


class PrepackedLinears:
    """The linear layers of a module on the CPU; inside `applied` they compute with prepared weights.

    RMS norms compute in C there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._products: dict[nn.Module, Product] | None = None
        self._norms: dict[nn.Module, NormRows] = {}

    def refresh(self) -> None:
        """Prepare the weights of all layers, one at a time, so that a new copy can reuse the memory of the old one."""
        products = self._products or {}
        for layer in list(products or _eligible(self.module)):
            products.pop(layer, None)  # free first: new memory costs more than packing
            products[layer] = _prepare(layer)
        self._products = products
        self._norms = {layer: norm for layer in self.module.modules() if (norm := rms_norm_of(layer)) is not None}

    def release(self) -> None:
        """Free the copies. The next use creates them again."""
        self._products, self._norms = None, {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the module's linear layers compute with prepared weights inside the context, and its norms in C."""
        if self._products is None:
            self.refresh()
        replaced = (self._products or {}) | self._norms
        for layer, forward in replaced.items():
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in replaced:
                del layer.__dict__["forward"]

    @property
    def bytes(self) -> int:
        """The bytes of the copies."""
        weights = (_weight(layer) for layer in self._products or {})
        return sum(w.nbytes for w in weights if not (in_place_kernel_supports(w) and w.is_contiguous()))


def copies_weights(dtype: torch.dtype) -> bool:
    """Return whether preparing weights of `dtype` copies them; otherwise they are read in place."""
    return dtype != torch.bfloat16 or not has_in_place_kernel()


def move_to_huge_pages(module: nn.Module) -> None:
    """Move the parameters that a step reads in place to huge pages, one after the other.

    transformers maps files of weights into memory: in small pages, at any address. Does nothing if memory is short.
    """
    parameters = [p for p in module.parameters() if p.device.type == "cpu" and not copies_weights(p.dtype)]
    shapes = [p.shape for p in parameters]
    size = aligned_bytes(shapes, torch.bfloat16)
    if HUGE_PAGE <= size <= host_memory().available // 2:
        memory = divide_memory(allocate(size, torch.device("cpu")), shapes, torch.bfloat16)
        for parameter, target in zip(parameters, memory, strict=True):
            parameter.data = target.copy_(parameter.data)


@torch.no_grad()
def rms_norm_of(module: nn.Module) -> NormRows | None:
    """Return the function of a module in bf16 that normalises as `norm.c` does; None for every other module.

    A trial with a few rows decides, because the models have classes of their own: Gemma's multiply by 1 + weight.
    """
    weight: Any = getattr(module, "weight", None)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_candidate = isinstance(weight, Tensor) and weight.ndim == 1 and isinstance(eps, float)
    if not is_candidate or len([*module.parameters()]) > 1 or len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight = weight.detach()
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or library("norm") is None:
        return None
    norm, generator = NormRows(weight, eps), torch.Generator().manual_seed(0)
    x = (3 * torch.randn(2, len(weight), generator=generator)).bfloat16()
    same = torch.isclose(norm(x).float(), module(x).float(), rtol=2**-7, atol=1e-6)  # a number may round otherwise
    return norm if bool(same.all()) else None


def _prepare(layer: nn.Module) -> Product:
    weight, bias = _weight(layer), cast("Tensor | None", layer.bias)
    bias = None if bias is None else bias.detach()
    if in_place_kernel_supports(weight):
        return LinearRows(weight.contiguous(), bias)
    multiply, packed = pack_linear(weight, LAYOUT_ROWS[weight.dtype])
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _eligible(module: nn.Module) -> Iterator[nn.Module]:
    for layer in module.modules():
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
            continue
        weight = _weight(layer)
        is_large = weight.device.type == "cpu" and weight.numel() >= MIN_NUMEL.get(weight.dtype, 1 << 62)
        if is_large and (in_place_kernel_supports(weight) or has_onednn(weight.dtype)):
            yield layer


def _weight(layer: nn.Module) -> Tensor:
    """Return the weight as (out, in)."""
    weight: Tensor = layer.weight.detach()  # type: ignore[union-attr, operator, assignment]
    return weight.t() if isinstance(layer, Conv1D) else weight
