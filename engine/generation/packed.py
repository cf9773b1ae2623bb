"""Linear layers laid out for small batches.

A product of a few rows with a large matrix is bound by reading the matrix. On CPUs PyTorch's own linear packs it anew
at each call; read beforehand into blocks for oneDNN, or where it lies by a kernel of ours
(`engine/kernels_cpu/linear.py`), it is read at up to twice the speed. Which of the two is decided by the precision and
by what the processor can do, never by a measurement, so that a machine says the same in each run. Layers that read the
same input (a block's queries, keys and values) may be laid out as one, which is read faster than three.

oneDNN's packs are copies, and made again when the weight may have changed. In bf16 its product is PyTorch's own, bit
for bit, for up to 32 rows; with more, as of prompts, sums are rounded in another order. Ours needs no copy, but of a
weight that lies the other way round (GPT-2's). On GPUs weights are read where they lie (`side_by_side.py`).

Left out: matrices of experts, which are not linear layers; quantised weights.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.generation.side_by_side import WhereTheyLie, in_order
from engine.kernels_cpu import linear

# The number of rows that oneDNN's packs are laid out for. In bf16 the layout for one row is the faster one with more
# rows, too: a step of OPT-125M with 16 rows took 27.1 ms, and 34.5 ms in the layout for 16.
ROWS = {torch.bfloat16: 1, torch.float32: 16}
# Numbers below which the call costs more than it saves.
FEWEST_NUMBERS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 18}
FP32_ROWS = (1, 256)  # with more the packing is hidden; a row is read at 30 GB/s, by PyTorch's own product at 16

Forward = Callable[[Tensor], Tensor]


class _OneDNN:
    """Weights (outs, ins) as one matrix in oneDNN's layout."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        whole = weights[0].contiguous() if len(weights) == 1 else torch.cat([*weights])
        self.weight = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS[whole.dtype])
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            each = zip(biases, weights, strict=True)
            self.bias = torch.cat([bias if bias is not None else w.new_zeros(len(w)) for bias, w in each])

    def __call__(self, x: Tensor, *, relu: bool = False) -> Tensor:
        then = "relu" if relu else "none"
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "")
        return product


class Pack:
    """Layers that read the same input as one matrix: (..., in) -> (..., sum of their outs)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        self.outs = [_out_by_in(layer).shape[0] for layer in layers]
        self.dtype = _out_by_in(layers[0]).dtype
        self.on_device = _out_by_in(layers[0]).device.type != "cpu"
        self.in_place = not self.on_device and linear.serves([_out_by_in(layer) for layer in layers])
        self._product: linear.LinearRows | _OneDNN | WhereTheyLie | None = None
        self._asked: Tensor | None = None
        self._answers: list[Tensor] = []

    @property
    def filled(self) -> bool:
        return self._product is not None

    def fill(self) -> None:
        """Take the weights as they are now."""
        self._product = None  # free first: new memory costs more than packing does
        weights, biases = [_out_by_in(layer) for layer in self.layers], [_bias(layer) for layer in self.layers]
        if self.on_device:
            self._product = WhereTheyLie(weights, biases)
        elif self.in_place:
            self._product = linear.LinearRows([weight.contiguous() for weight in weights], biases)
        else:
            self._product = _OneDNN(weights, biases)

    @property
    def bytes(self) -> int:
        """What is held beside the weights themselves."""
        if self._product is None or self.on_device:
            return 0
        copied = [w for w in map(_out_by_in, self.layers) if not (self.in_place and w.is_contiguous())]
        return sum(weight.numel() * weight.itemsize for weight in copied)

    def free(self) -> None:
        """Let go of weights and copies until `fill`."""
        self._product = None

    def pays(self, rows: int) -> bool:
        """Whether a product of so many rows is faster than PyTorch's own."""
        if self.on_device or self.in_place:
            return True
        return self.dtype != torch.float32 or FP32_ROWS[0] <= rows <= FP32_ROWS[1]

    def product(self, x: Tensor, relu: bool = False) -> Tensor:
        """What all layers give, side by side; with `relu` nothing below zero."""
        assert self._product is not None, "a pack is filled before it is asked"
        return self._product(x, relu=relu)

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        """One layer's product. Of layers that were packed together the first that is asked computes all."""
        if not self.pays(x.numel() // x.shape[-1]):
            plain: Tensor = type(layer).forward(layer, x)
            return plain
        if len(self.layers) == 1:
            return self.product(x)
        if self._asked is not x:
            self._asked, self._answers = x, list(self.product(x).split(self.outs, -1))
        answer = self._answers[self.layers.index(layer)]
        if layer is self.layers[-1]:
            self._asked, self._answers = None, []
        return answer


class PackedLinears:
    """Packs of a module's linear layers on `device`; `applied` puts them to work.

    `version` counts how often weights were packed or freed.
    """

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.module, self.device = module, device
        self.version = 0
        self._packs: dict[nn.Module, Pack] = {}
        self._made = False

    def refresh(self, changed: Collection[nn.Module] | None = None) -> None:
        """Pack what is not packed, and again these layers, or all: their weights are others now.

        One at a time, so that each goes where an older one was.
        """
        for layer in _packable(self.module, self.device):
            if layer not in self._packs:
                self._packs[layer] = Pack([layer])
        for pack in dict.fromkeys(self._packs.values()):
            if changed is None or not pack.filled or any(layer in changed for layer in pack.layers):
                pack.fill()
        self._made, self.version = True, self.version + 1

    def release(self) -> None:
        """Free the packs; they are made again at the next use."""
        for pack in self._packs.values():
            pack.free()
        self._made, self.version = False, self.version + 1

    def joinable(self, layers: Sequence[nn.Module]) -> Sequence[nn.Module] | None:
        """Layers that always read the same input in the order in which to join them; None where that doesn't pay."""
        if len({self._packs[layer].dtype for layer in layers}) > 1:
            return None
        if self.device == "cpu":
            return layers
        order = in_order([_out_by_in(layer) for layer in layers], [_bias(layer) for layer in layers])
        return None if order is None else [layers[place] for place in order]

    def join(self, layers: Sequence[nn.Module]) -> Pack:
        """Layers that always read the same input, one after the other, packed as one from now on."""
        pack = self._packs[layers[0]]
        if pack.layers != tuple(layers):
            assert all(len(self._packs[layer].layers) == 1 for layer in layers), "a layer is in one pack"
            pack = Pack(layers)
            for layer in layers:
                self._packs[layer].free()
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

    @property
    def bytes(self) -> int:
        """What is held beside the weights themselves."""
        return sum(pack.bytes for pack in dict.fromkeys(self._packs.values()))

    def __len__(self) -> int:
        """How many layers are packed."""
        return sum(pack.filled for pack in self._packs.values())


def available(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` can be laid out here."""
    return not copies(dtype) or _onednn_packs(dtype)


def copies(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` are copied where they are laid out; else they are read where they lie."""
    return dtype != torch.bfloat16 or linear.way() == linear.Way.LEAVE


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this PyTorch can pack and multiply weights of `dtype` here; the operators are not public."""
    ops: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or dtype not in FEWEST_NUMBERS:
        return False
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or bool(ops._is_mkldnn_bf16_supported())


def _packable(module: nn.Module, device: str) -> Iterator[nn.Module]:
    for layer in module.modules():
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
            continue
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if weight.device.type != device:
            continue
        if device != "cpu":
            yield layer
            continue
        if weight.numel() < FEWEST_NUMBERS.get(weight.dtype, 1 << 62):
            continue
        if linear.serves([_out_by_in(layer)]) or _onednn_packs(weight.dtype):
            yield layer


def _forward(pack: Pack, layer: nn.Module) -> Forward:
    return lambda x: pack.forward(layer, x)


def _out_by_in(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight.detach()  # type: ignore[union-attr, operator, assignment]
    return weight.t() if isinstance(layer, Conv1D) else weight


def _bias(layer: nn.Module) -> Tensor | None:
    bias: Any = layer.bias
    return None if bias is None else bias.detach()
