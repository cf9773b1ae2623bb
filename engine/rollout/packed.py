"""Linear layers with weights packed for oneDNN, for small batches on CPUs.

A product of a few rows with a large matrix is bound by reading the matrix; packed beforehand into blocks it is read at
twice the speed, where PyTorch's own linear repacks it at each call. In bf16 the result is the same, bit for bit, for up
to 32 rows; with more, as of prompts, sums are rounded in another order. Layers that read the same input (a block's
queries, keys and values) may be packed as one matrix, which is read faster than three. A pack is a copy, and is made
again when the weight may have changed.

Left out: matrices of experts, which are not linear layers; quantised weights.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# The number of rows that packs are laid out for. In bf16 the layout for one row is the faster one with more rows, too:
# a step of OPT-125M with 16 rows took 27.1 ms, and 34.5 ms in the layout for 16.
ROWS = {torch.bfloat16: 1, torch.float32: 16}
# Numbers below which the call costs more than it saves.
FEWEST_NUMBERS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 18}
FP32_ROWS = (4, 256)  # with fewer rows PyTorch's own fp32 product is as fast, with more the packing is hidden

Forward = Callable[[Tensor], Tensor]


class Pack:
    """Layers that read the same input as one packed matrix: (..., in) -> (..., sum of their outs)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.outs = [_out_by_in(layer).shape[0] for layer in layers]
        self.dtype = _out_by_in(layers[0]).dtype
        self._asked: Tensor | None = None
        self._answers: list[Tensor] = []

    def fill(self) -> None:
        """Pack the weights as they are now."""
        weights = [_out_by_in(layer) for layer in self.layers]
        whole = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        self.weight = None  # free first: new memory costs more than packing does
        self.weight = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS[self.dtype])
        biases = [_bias(layer) for layer in self.layers]
        if any(bias is not None for bias in biases):
            filled = [b if b is not None else w.new_zeros(len(w)) for b, w in zip(biases, weights, strict=True)]
            self.bias = filled[0] if len(filled) == 1 else torch.cat(filled)

    def pays(self, rows: int) -> bool:
        """Whether a product of so many rows is faster than PyTorch's own."""
        return self.dtype != torch.float32 or FP32_ROWS[0] <= rows <= FP32_ROWS[1]

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        """One layer's product. Of layers that were packed together the first that is asked computes all."""
        if not self.pays(x.numel() // x.shape[-1]):
            plain: Tensor = type(layer).forward(layer, x)
            return plain
        if len(self.layers) == 1:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        if self._asked is not x:
            joint = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            self._asked, self._answers = x, list(joint.split(self.outs, -1))
        answer = self._answers[self.layers.index(layer)]
        if layer is self.layers[-1]:
            self._asked, self._answers = None, []
        return answer


class PackedLinears:
    """Packs of a module's linear layers; `applied` puts them to work. Nothing is packed off CPUs.

    `version` counts how often weights were packed or freed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.version = 0
        self._packs: dict[nn.Module, Pack] = {}
        self._made = False

    def refresh(self, changed: Collection[nn.Module] | None = None) -> None:
        """Pack what is not packed, and again these layers, or all: their weights are others now.

        One at a time, so that each goes where an older one was.
        """
        for layer in _packable(self.module):
            if layer not in self._packs:
                self._packs[layer] = Pack([layer])
        for pack in dict.fromkeys(self._packs.values()):
            if changed is None or pack.weight is None or any(layer in changed for layer in pack.layers):
                pack.fill()
        self._made, self.version = True, self.version + 1

    def release(self) -> None:
        """Free the packs; they are made again at the next use."""
        for pack in self._packs.values():
            pack.weight = pack.bias = None
        self._made, self.version = False, self.version + 1

    def join(self, layers: Sequence[nn.Module]) -> Pack:
        """Layers that always read the same input, one after the other, packed as one from now on."""
        pack = self._packs[layers[0]]
        if pack.layers != tuple(layers):
            assert all(len(self._packs[layer].layers) == 1 for layer in layers), "a layer is in one pack"
            pack = Pack(layers)
            for layer in layers:
                self._packs[layer].weight = None
                self._packs[layer] = pack
            pack.fill()
            self.version += 1
        return pack

    def of(self, layer: nn.Module) -> Pack:
        """The pack that a layer is in."""
        return self._packs[layer]

    @contextmanager
    def applied(self, through: Callable[[nn.Module, Forward], Forward] | None = None) -> Iterator[None]:
        """Within the block the module's linear layers compute with packed weights; `through` wraps their forwards."""
        if not self._made:
            self.refresh()
        for layer, pack in self._packs.items():
            forward = _forward(pack, layer)
            layer.__dict__["forward"] = forward if through is None else through(layer, forward)
        try:
            yield
        finally:
            for layer in self._packs:
                layer.__dict__.pop("forward", None)

    def __len__(self) -> int:
        """How many layers are packed."""
        return sum(pack.weight is not None for pack in self._packs.values())


def available(dtype: torch.dtype) -> bool:
    """Whether this PyTorch can pack and multiply weights of `dtype` here; the operators are not public."""
    ops: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or dtype not in FEWEST_NUMBERS:
        return False
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or bool(ops._is_mkldnn_bf16_supported())


def _packable(module: nn.Module) -> Iterator[nn.Module]:
    for layer in module.modules():
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
            continue
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if weight.device.type != "cpu" or weight.numel() < FEWEST_NUMBERS.get(weight.dtype, 1 << 62):
            continue
        if available(weight.dtype):
            yield layer


def _forward(pack: Pack, layer: nn.Module) -> Forward:
    return lambda x: pack.forward(layer, x)


def _out_by_in(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight.detach()  # type: ignore[union-attr, operator, assignment]
    return weight.t() if isinstance(layer, Conv1D) else weight


def _bias(layer: nn.Module) -> Tensor | None:
    bias: Any = layer.bias
    return None if bias is None else bias.detach()
