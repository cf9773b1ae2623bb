"""Linear layers as one product where they lie, on GPUs.

A product of few rows is bound by reading the weights, and a GPU has hardly begun to read a small matrix when it ends.
The inference model lays a block's layers out side by side (`inference_model.py`), and `lay_out` those of any other
model; then one matrix covers the weights of several layers, and nothing is copied.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors (n, ...) of which each begins where the one before it ends, as one; None where they don't."""
    first = tensors[0]
    memory, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        alike = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:]
        if not alike or tensor.untyped_storage().data_ptr() != memory or tensor.data_ptr() != at:
            return None
        if not tensor.is_contiguous():
            return None
        at += tensor.nbytes
    if len(tensors) == 1:
        return first
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def in_order(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[int] | None:
    """The places of layers in the order in which they lie side by side; None where they don't."""
    order = sorted(range(len(weights)), key=lambda place: weights[place].data_ptr())
    found = [biases[place] for place in order]
    there = [bias for bias in found if bias is not None]
    if there and (len(there) < len(found) or side_by_side(there) is None):
        return None
    return order if side_by_side([weights[place] for place in order]) is not None else None


@torch.no_grad()
def lay_out(module: nn.Module) -> None:
    """Put the weights of a block's linear layers side by side, and their biases; takes a block's memory on the way.

    The parameters stay the same objects, at other addresses: for a module that nobody else reads meanwhile.
    """
    together: dict[object, dict[int, nn.Parameter]] = {}
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear:
            for leaf, parameter in layer.named_parameters():
                key = (name.rpartition(".")[0], leaf, parameter.dtype, parameter.device)
                together.setdefault(key, {})[id(parameter)] = parameter
    for parameters in (list(each.values()) for each in together.values()):
        if len(parameters) > 1:
            parts = torch.cat([p.flatten() for p in parameters]).split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part.view(parameter.shape)


class WhereTheyLie:
    """Weights (outs, ins) and biases of layers: x (..., ins) -> (..., all outs)."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._each = list(zip(weights, biases, strict=True))  # what lay together when it was joined may not any more
        weight = side_by_side(weights) if in_order(weights, biases) is not None else None
        if weight is not None:
            there = [bias for bias in biases if bias is not None]
            self._each = [(weight, side_by_side(there) if there else None)]

    def __call__(self, x: Tensor, *, relu: bool = False) -> Tensor:
        products = [_product(x, weight, bias, relu) for weight, bias in self._each]
        return products[0] if len(products) == 1 else torch.cat(products, -1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    if not relu:
        return functional.linear(x, weight, bias)
    if bias is None:
        return functional.linear(x, weight).relu_()
    rows: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t())  # one call of cuBLASLt
    return rows.view(*x.shape[:-1], -1)
