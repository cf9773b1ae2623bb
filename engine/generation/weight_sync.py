"""Weight sync: copy a training module's parameters into the memory of an inference model, with adapters merged.

Each rank casts its shard of a parameter to the inference precision, and one all-gather makes the full parameter. A
parameter with an adapter is gathered in its own precision. The LoRA update (Hu et al., 2021, arXiv:2106.09685) is added
in fp32, and the sum is cast once. The live parameters are only read: merging into the live base and subtracting the
update afterwards would change the base a little in 16 bit.

`live_parameters` maps each parameter name of the inference model to the live parameter. `split_regions` splits an
inference model over ranks by the plan of training (`engine/parallel/tensor.py`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.loading import read_region
from engine.parallel import dtensors, meshes, tensor, zero
from engine.parallel.dtensors import Region

ALIGNMENT = 64  # bytes
WRAPPED = ".base_layer.weight"  # the end of the name of a weight with an adapter


@dataclass(frozen=True, eq=False)
class LiveParameter:
    """A parameter of the training module, sharded or full, and the LoRA layer over it, if any.

    Tied parameters are one object.
    """

    parameter: Tensor
    lora: nn.Module | None


def live_parameters(source: nn.Module) -> dict[str, LiveParameter]:
    """Return the live parameters of a training module under their names, and under their names without adapters.

    Raises ValueError for an adapter that is not W + scaling * B @ A, because an incomplete update would be wrong, and
    for peft's wrapper of a model, which may train copies of other layers.
    """
    if hasattr(source, "get_base_model"):
        raise ValueError("the model is in a wrapper of peft: add adapters with peft.inject_adapter_in_model instead")
    lora = {path: layer for path, layer in source.named_modules(remove_duplicate=False) if hasattr(layer, "lora_A")}
    for path, layer in lora.items():
        _check_lora(path, layer)
    live: dict[str, LiveParameter] = {}
    tied: dict[tuple[int, int], LiveParameter] = {}
    for name, parameter in source.named_parameters(remove_duplicate=False):
        layer = lora.get(name.removesuffix(WRAPPED)) if name.endswith(WRAPPED) else None
        first = tied.setdefault((id(parameter), id(layer)), LiveParameter(parameter, layer))
        live[name] = live[base_name(name)] = first
    return live


def base_name(name: str) -> str:
    """Return the name of a parameter or buffer without the layers of peft."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def copy_weight(live: LiveParameter, target: Tensor, region: Region | None = None) -> None:
    """Fill `target` with a region of a live parameter, by default the full one. Collective.

    A LoRA update is added in fp32. A shard without an update is cast before the gather.
    """
    parameter = live.parameter.detach()
    if live.lora is not None:
        full = dtensors.full_tensor(parameter).to(target.device) + lora_update(live.lora, target.device)
    else:
        full = dtensors.full_tensor(parameter if dtensors.is_full(parameter) else parameter.to(target.dtype))
    target.copy_(full if region is None else read_region(full, region))


def aligned_bytes(shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
    """Return the bytes of tensors of these shapes in one block of memory, where each starts at a multiple of 64."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in shapes)


def divide_memory(memory: Tensor, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield tensors of these shapes in a block of bytes, in the layout of `aligned_bytes`."""
    for shape in shapes:
        yield memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        memory = memory[aligned_bytes([shape], dtype) :]


def split_regions(module: nn.Module, ranks: int, plan: Mapping[str, str] | None) -> dict[str, Region]:
    """Split a module on the meta device, in place, over groups of `ranks` neighbouring ranks; return regions by name.

    `plan` defaults to the plan of the model's class. Raises ValueError if the module cannot be split.
    """
    mesh = meshes.tensor_mesh(ranks)
    tensor.parallelize(module, plan or tensor.plan_of(module), mesh)
    regions = {}
    for path, owner in module.named_modules():
        for leaf, parameter in list(owner._parameters.items()):
            if isinstance(parameter, DTensor):
                regions[f"{path}.{leaf}"] = dtensors.local_region(parameter)
                owner._parameters[leaf] = nn.Parameter(dtensors.local(parameter.detach()), requires_grad=False)
    return regions


@torch.no_grad()
def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without adapters, full tensor) of each parameter on every rank; tied parameters come once.

    Gathering a sharded parameter is a collective, in the same order on all ranks. A tensor may share memory with the
    live parameter if that one is not sharded and has no adapter. A packed layer yields the result of `full_weight`.
    Raises ValueError like `live_parameters`.
    """
    live = live_parameters(module)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            continue
        full = dtensors.full_tensor(parameter.detach())
        if (layer := live[name].lora) is not None:
            full = (full.float() + lora_update(layer, full.device)).to(full.dtype)
        yield base_name(name), full
    for path, layer in module.named_modules():
        if zero.is_packed(layer):
            full = layer.full_weight()  # type: ignore[operator]
            if path.endswith(".base_layer"):
                full = full.float() + lora_update(module.get_submodule(path.removesuffix(".base_layer")), full.device)
            yield base_name(f"{path}.weight"), full


@torch.no_grad()
def lora_factors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of each LoRA factor on every rank. Gathering a sharded factor is a collective."""
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            yield name, dtensors.full_tensor(parameter.detach())


def lora_update(layer: nn.Module, device: torch.device) -> Tensor:
    """Return the sum of scaling * B @ A over a LoRA layer's active adapters: fp32, laid out like its weight.

    Gathers the factors A (r, in) and B (out, r). A layer with `fan_in_fan_out` (GPT-2's Conv1D) stores its weight as
    (in, out).
    """
    scaling: Any = layer.scaling
    factors: Any = layer.lora_A, layer.lora_B
    names: Any = layer.active_adapters
    total: Any = 0.0
    for name in names:
        a, b = (dtensors.full_tensor(each[name].weight.detach()).to(device).float() for each in factors)
        update = (b @ a).T if getattr(layer, "fan_in_fan_out", False) else b @ a
        total = total + scaling[name] * update
    return total  # type: ignore[no-any-return]


def _check_lora(path: str, layer: nn.Module) -> None:
    variant = bool(getattr(layer, "lora_variant", None)) or any(getattr(layer, "lora_bias", {}).values())
    variant = variant or getattr(layer, "parameter_name", "weight") != "weight"  # of experts, for example
    if variant or layer.merged or not all(name in layer.lora_A for name in layer.active_adapters):  # type: ignore[operator, union-attr]
        raise ValueError(
            f"the adapter of {path} cannot be merged: only plain LoRA on linear layers can, not DoRA, not LoRA with a "
            "bias, not adapters of experts, not adapters that peft has merged; use plain LoRA"
        )
