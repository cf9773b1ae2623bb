"""Linear layers with frozen weights in 4 bits: NF4 (QLoRA: Dettmers et al., 2023, arXiv:2305.14314), by bitsandbytes.

A block of 64 weights is stored as 4-bit codes and one fp32 scale: 4.5 bits per weight. The scales are not quantized a
second time. Each product dequantizes the weight to the precision of its input, in forward and again in backward.
Training and generation therefore compute the same numbers. The library's fused product for single rows is not used,
because it rounds in another order.

Embeddings, norms, biases, heads and experts that are stored as one tensor remain in 16 or 32 bits.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipeline.models.adapters import is_linear

BLOCK = 64  # weights that share a scale
BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK


@cache
def _library() -> Any:
    """Return `bitsandbytes.functional`."""
    from bitsandbytes import functional  # imported here because it belongs to an optional extra

    return functional


class QuantizedLinear(nn.Module):
    """A linear layer with a frozen weight in NF4: x (..., in) -> (..., out).

    The codes `packed` and the scales `absmax` are buffers without elements until `quantize` fills them. They belong to
    no checkpoint, because the weight is frozen and can be read again. FSDP2 does not shard buffers.
    """

    packed: Tensor
    absmax: Tensor

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        """Take the shape and the bias of a layer without values."""
        super().__init__()
        self.shape = tuple(layer.weight.shape)
        self.is_transposed = isinstance(layer, Conv1D)  # the weight is (in, out), not (out, in)
        self.in_features, self.out_features = self.shape if self.is_transposed else self.shape[::-1]
        self.bias = layer.bias
        self._read: Callable[[], Tensor] | None = None
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        self.register_buffer("absmax", torch.empty(0), persistent=False)

    def empty_weight(self, device: torch.device | str) -> nn.Parameter:
        """Return a parameter in fp32 with the shape of the weight, without values."""
        return nn.Parameter(torch.empty(self.shape, device=device), requires_grad=False)

    @torch.no_grad()
    def quantize(self, read: Callable[[], Tensor]) -> None:
        """Quantize the weight that `read` returns: fp32, (out, in) or (in, out). `full_weight` calls `read` again."""
        self._read = read
        self.packed, state = _library().quantize_4bit(
            read().contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False
        )
        self.absmax = state.absmax

    def full_weight(self) -> Tensor:
        """Return the weight before quantization, in fp32."""
        assert self._read is not None, "quantize was not called"
        return self._read()

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as the products use it: (out, in), or (in, out) for a layer of GPT-2.

        The library gets the shape (blocks, 64). Its CPU kernel misreads a weight with a block in two rows
        (bitsandbytes 0.50.2, a width that 64 does not divide).
        """
        library, count = _library(), math.prod(self.shape)
        flat = (count // BLOCK, BLOCK) if count % BLOCK == 0 else (count,)
        state = library.QuantState(self.absmax, shape=torch.Size(flat), blocksize=BLOCK, quant_type="nf4", dtype=dtype)
        weight: Tensor = library.dequantize_4bit(self.packed, state)
        return weight.view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        out: Tensor = _Product.apply(x, self)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """The product with a frozen weight. Autograd holds neither the input nor the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        weight = layer.dequantized(x.dtype)
        return x @ (weight if layer.is_transposed else weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        weight = ctx.layer.dequantized(upstream.dtype)
        return upstream @ (weight.T if ctx.layer.is_transposed else weight), None


def quantize_linears(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model by `QuantizedLinear`, in place, except the head and the value head.

    Parameters may be on the meta device.
    """
    head = model.get_output_embeddings()
    excluded = {head, getattr(head, "base_layer", None), getattr(model, "score", None)}
    layers = {
        path: layer
        for path, layer in model.named_modules()
        if ".lora_" not in path and layer not in excluded and is_linear(layer)
    }
    for path, layer in layers.items():
        assert isinstance(layer, nn.Linear | Conv1D)
        model.set_submodule(path, QuantizedLinear(layer))


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers of a module by path."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, QuantizedLinear)}
