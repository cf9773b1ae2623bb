"""Full parameters of a sharded module, with LoRA adapters merged into copies.

LoRA: Hu et al., 2021, arXiv:2106.09685. The live parameters are only read. Merging into the live base and subtracting
the update afterwards would change the base a little in 16 bit.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel import dtensors

LoraFactors = Sequence[tuple[float, Tensor, Tensor]]
"""(scaling, A (r, in), B (out, r)) of each active adapter of one layer."""


@torch.no_grad()
def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without adapters, full tensor) of each parameter on every rank; tied parameters come once.

    Gathering a sharded parameter is a collective, in the same order on all ranks. A tensor may share memory with the
    live parameter if that one is not sharded and has no adapter.
    """
    lora_layers = {name: child for name, child in module.named_modules() if hasattr(child, "lora_A")}
    for name, parameter in module.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        full = dtensors.full_tensor(parameter.detach())
        owner, _, leaf = name.rpartition(".")
        layer = lora_layers.get(owner.removesuffix(".base_layer"))
        if layer is not None and leaf == "weight":
            full = (full.float() + full_lora_update(layer, full.device)).to(full.dtype)
        yield name.replace(".base_layer.", "."), full


def full_lora_update(layer: nn.Module, device: torch.device) -> Tensor:
    """Return the sum of scaling * B @ A over a LoRA layer's active adapters: fp32, in the layout of its weight."""
    factors = [
        (scaling, dtensors.full_tensor(a).to(device).float(), dtensors.full_tensor(b).to(device).float())
        for scaling, a, b in lora_factors(layer)
    ]
    return lora_update(layer, factors, slice(None))


def lora_factors(layer: nn.Module) -> LoraFactors:
    """Return the live factors of a LoRA layer's active adapters; they may be sharded."""
    scaling: Any = layer.scaling
    a: Any = layer.lora_A
    b: Any = layer.lora_B
    names: Any = layer.active_adapters
    return [(scaling[name], a[name].weight.detach(), b[name].weight.detach()) for name in names]


def lora_update(layer: nn.Module, factors: LoraFactors, rows: slice) -> Tensor:
    """Return rows of the sum of scaling * B @ A for full `factors`, in the layout of the layer's weight.

    A layer with `fan_in_fan_out` (GPT-2's Conv1D) stores its weight as (in, out).
    """
    transposed = getattr(layer, "fan_in_fan_out", False)
    terms = [scaling * ((b @ a[:, rows]).T if transposed else b[rows] @ a) for scaling, a, b in factors]
    return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]
