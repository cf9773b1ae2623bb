"""Whole parameters of a sharded module, one after another, with LoRA adapters merged into the copies.

LoRA: Hu et al., 2021, arXiv:2106.09685. The live parameters are only read: a base that is rewritten and restored in
16 bit drifts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel import dtensors


@torch.no_grad()
def whole_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without adapters, whole tensor) on every rank.

    Each sharded parameter is a collective, in the same order on all. A tensor may share memory with the live parameter
    where that is whole and has no adapter. Tied parameters come once.
    """
    adapted = {name: child for name, child in module.named_modules() if hasattr(child, "lora_A")}
    for name, parameter in module.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        whole = dtensors.full_tensor(parameter.detach())
        owner, _, leaf = name.rpartition(".")
        layer = adapted.get(owner.removesuffix(".base_layer"))
        if layer is not None and leaf == "weight":
            whole = (whole.float() + adapter_delta(layer, whole.device)).to(whole.dtype)
        yield name.replace(".base_layer.", "."), whole


def adapter_delta(layer: nn.Module, device: torch.device) -> Tensor:
    """The sum of scaling * B @ A over a LoRA layer's active adapters, fp32, in the layout of the layer's weight."""
    factors = [
        (scaling, dtensors.full_tensor(down).to(device).float(), dtensors.full_tensor(up).to(device).float())
        for scaling, down, up in active_matrices(layer)
    ]
    return update_rows(layer, factors, slice(None))


def active_matrices(layer: nn.Module) -> list[tuple[float, Tensor, Tensor]]:
    """(scaling, A (r, in), B (out, r)) of each of a LoRA layer's active adapters, as they are: they may be sharded."""
    scaling: Any = layer.scaling
    down: Any = layer.lora_A
    up: Any = layer.lora_B
    names: Any = layer.active_adapters
    return [(scaling[name], down[name].weight.detach(), up[name].weight.detach()) for name in names]


def update_rows(layer: nn.Module, factors: Sequence[tuple[float, Tensor, Tensor]], rows: slice) -> Tensor:
    """Some rows of the sum of scaling * B @ A, in the layout of the layer's weight, which may be stored transposed."""
    transposed = getattr(layer, "fan_in_fan_out", False)
    terms = [s * ((up @ down[:, rows]).T if transposed else up[rows] @ down) for s, down, up in factors]
    return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]
