"""Whole parameters of a sharded module, one after another, with LoRA adapters merged into the copies.

LoRA: Hu et al., 2021, arXiv:2106.09685. The live parameters are only read: a base that is rewritten and restored in
16 bit drifts.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.parallel import dist


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
        whole = dist.full_tensor(parameter.detach())
        owner, _, leaf = name.rpartition(".")
        layer = adapted.get(owner.removesuffix(".base_layer"))
        if layer is not None and leaf == "weight":
            whole = (whole.float() + adapter_delta(layer, whole.device)).to(whole.dtype)
        yield name.replace(".base_layer.", "."), whole


def adapter_delta(layer: nn.Module, device: torch.device) -> Tensor:
    """The sum of scaling * B @ A over a LoRA layer's active adapters, fp32, in the layout of the layer's weight."""
    total: Tensor | None = None
    for adapter in layer.active_adapters:  # type: ignore[union-attr]
        down = dist.full_tensor(layer.lora_A[adapter].weight.detach()).to(device).float()  # type: ignore[index, union-attr]
        up = dist.full_tensor(layer.lora_B[adapter].weight.detach()).to(device).float()  # type: ignore[index, union-attr]
        delta = layer.scaling[adapter] * (up @ down)  # type: ignore[index]
        total = delta if total is None else total + delta
    assert total is not None
    return total.T if getattr(layer, "fan_in_fan_out", False) else total
