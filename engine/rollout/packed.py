"""Linear layers with weights packed for oneDNN, for small batches on CPUs.

A product of a few rows with a large matrix is bound by reading the matrix; packed beforehand into blocks it is read at
twice the speed (in bf16 bit for bit with the same result), where PyTorch's own linear repacks it at each call. A pack
is a copy, and is made again when the weight may have changed.

Left out: matrices of experts, which are not linear layers; quantised weights.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ROWS = 16  # the batch size that packs are laid out for
# Numbers below which the call costs more than it saves.
FEWEST_NUMBERS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 18}
FP32_ROWS = (4, 256)  # with fewer rows PyTorch's own fp32 product is as fast, with more the packing is hidden


class PackedLinears:
    """Packs of a module's linear layers; `applied` puts them to work. Nothing is packed off CPUs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._packs: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self._made = False

    def refresh(self, changed: Collection[nn.Module] | None = None) -> None:
        """Pack what is not packed, and again these layers, or all: their weights are others now.

        One at a time, so that each goes where an older one was: new memory costs more than packing does.
        """
        for layer, weight in _packable(self.module):
            if changed is None or layer in changed or layer not in self._packs:
                self._packs[layer] = _packed_forward(layer, weight)
        self._made = True

    def release(self) -> None:
        """Free the packs; they are made again at the next use."""
        self._packs, self._made = {}, False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the module's linear layers compute with packed weights."""
        if not self._made:
            self.refresh()
        for layer, forward in self._packs.items():
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in self._packs:
                layer.__dict__.pop("forward", None)

    def __len__(self) -> int:
        return len(self._packs)


def available(dtype: torch.dtype) -> bool:
    """Whether this PyTorch can pack and multiply weights of `dtype` here; the operators are not public."""
    ops: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or dtype not in FEWEST_NUMBERS:
        return False
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or bool(ops._is_mkldnn_bf16_supported())


def _packable(module: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    for layer in module.modules():
        if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
            continue
        weight: Tensor = layer.weight.detach()  # type: ignore[union-attr, operator, assignment]
        if weight.device.type != "cpu" or weight.numel() < FEWEST_NUMBERS.get(weight.dtype, 1 << 62):
            continue
        if available(weight.dtype):
            yield layer, weight


def _packed_forward(layer: nn.Module, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The layer's forward with its weight packed; (..., in) -> (..., out)."""
    out_by_in = weight.t().contiguous() if isinstance(layer, Conv1D) else weight
    pack = torch.ops.mkldnn._reorder_linear_weight(out_by_in, ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    bias = layer.bias.detach() if layer.bias is not None else None  # type: ignore[operator, union-attr]
    plain = type(layer).forward

    def forward(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, pack, bias, "none", [], "")
        return result

    def forward_fp32(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return forward(x) if FP32_ROWS[0] <= rows <= FP32_ROWS[1] else plain(layer, x)

    return forward_fp32 if weight.dtype == torch.float32 else forward
