"""Weight sync: copy a training module's parameters into the memory of an inference model.

Each rank takes its own rows of a parameter, adds its rows of the LoRA update in fp32, and casts the sum to the
inference precision once. One all-gather of the rows writes the parameter, directly into its target if the ranks have
equally many rows.

`live_parameters` maps each parameter name of the inference model to the live parameter. `tensor_parallel_slices` splits
an inference model over ranks by the plan of training (`engine/parallel/tensor.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.full_parameters import LoraFactors, lora_factors, lora_update
from engine.loading import local_rows
from engine.parallel import collectives, dist, dtensors, meshes, tensor


@dataclass(frozen=True, eq=False)
class LiveParameter:
    """A parameter of the training module, sharded or full, and the LoRA layer over it, if any.

    Tied parameters are one object.
    """

    parameter: Tensor
    lora: nn.Module | None


@dataclass(frozen=True)
class Slice:
    """The slice of a parameter that one of `count` tensor-parallel ranks holds.

    Dimension `dim` consists of `blocks` fused matrices. The rank holds slice `index` of each of them.
    """

    dim: int
    count: int
    index: int
    blocks: int = 1

    def of(self, full: Tensor) -> Tensor:
        """Return the slice of a full tensor: a view if there is one block, else a copy."""
        length = full.shape[self.dim] // (self.blocks * self.count)
        slices = [block.narrow(self.dim, self.index * length, length) for block in full.chunk(self.blocks, self.dim)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, self.dim)


@dataclass(frozen=True)
class WeightCopy:
    """One parameter to copy: the live parameter and the target memory.

    `slice` is the slice to copy; None copies the full parameter.
    """

    live: LiveParameter
    target: Tensor
    slice: Slice | None = None

    @property
    def parameter(self) -> Tensor:
        return self.live.parameter.detach()


def live_parameters(source: nn.Module) -> dict[str, LiveParameter]:
    """Return the live parameters of a training module under the names that they have without adapters.

    Raises ValueError for an adapter that is not W + scaling * B @ A: an incomplete update would be wrong.
    """
    lora = {path: layer for path, layer in source.named_modules(remove_duplicate=False) if hasattr(layer, "lora_A")}
    for path, layer in lora.items():
        _check_lora(path, layer)
    live: dict[str, LiveParameter] = {}
    tied: dict[tuple[int, int], LiveParameter] = {}
    for path, owner in source.named_modules(remove_duplicate=False):
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                layer = lora.get(path.removesuffix(".base_layer")) if path.endswith(".base_layer") else None
                layer = layer if leaf == "weight" and layer is not None and not layer.merged else None
                first = LiveParameter(parameter, layer)
                live[base_name(path, leaf)] = tied.setdefault((id(parameter), id(layer)), first)
    return live


def base_name(path: str, leaf: str) -> str:
    """Return the name of a module's parameter or buffer without the wrappers of peft."""
    name = f"{path}.{leaf}" if path else leaf
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


@torch.no_grad()
def copy_weights(copies: Sequence[WeightCopy]) -> int:
    """Fill the targets of all copies and return the bytes written. Collective: every rank passes the same copies."""
    factors = _gather_factors([copy.live.lora for copy in copies if copy.live.lora is not None])
    for copy in copies:
        full = _full_values(copy, factors)
        if full.data_ptr() != copy.target.data_ptr():
            copy.target.copy_(full if copy.slice is None else copy.slice.of(full))
    return sum(copy.target.numel() * copy.target.element_size() for copy in copies)


def tensor_parallel_slices(module: nn.Module, ranks: int, plan: Mapping[str, str] | None) -> dict[str, Slice]:
    """Split a module on the meta device, in place, over groups of `ranks` neighbouring ranks; return slices by name.

    `plan` defaults to the plan of the model's class. Raises ValueError if the module cannot be split.
    """
    mesh = meshes.tensor_mesh(ranks)
    tensor.parallelize(module, plan or tensor.plan_of(module), mesh)
    slices = {}
    for path, owner in module.named_modules():
        for leaf, parameter in list(owner._parameters.items()):
            if isinstance(parameter, DTensor):
                placement: Any = parameter.placements[0]
                blocks = getattr(placement, "split_factor", 1)
                slices[f"{path}.{leaf}"] = Slice(placement.dim, mesh.size(), mesh.get_local_rank(), blocks)
                owner._parameters[leaf] = nn.Parameter(dtensors.local(parameter.detach()), requires_grad=False)
    return slices


Factors = Mapping[nn.Module, LoraFactors]


def _gather_factors(layers: Sequence[nn.Module]) -> Factors:
    """Return the full LoRA factors of each layer in fp32."""
    live = {layer: lora_factors(layer) for layer in layers}
    device = dist.world().device
    full = {
        id(factor): WeightCopy(
            LiveParameter(factor, None), torch.empty(factor.shape, dtype=torch.float32, device=device)
        )
        for factors in live.values()
        for _, *pair in factors
        for factor in pair
    }
    if full:
        copy_weights(list(full.values()))
    return {
        layer: [(scaling, full[id(a)].target, full[id(b)].target) for scaling, a, b in factors]
        for layer, factors in live.items()
    }


def _with_lora(copy: WeightCopy, values: Tensor, factors: Factors, rows: slice) -> Tensor:
    """Return rows of a parameter with the LoRA update added in fp32; without an adapter, return `values`."""
    if copy.live.lora is None:
        return values
    return values.to(copy.target.device, torch.float32) + lora_update(copy.live.lora, factors[copy.live.lora], rows)


def _full_values(copy: WeightCopy, factors: Factors) -> Tensor:
    """Return the full parameter with its LoRA update: in the target's memory if its rows fit there."""
    parameter, target = copy.parameter, copy.target
    if not dtensors.is_row_sharded(parameter):  # full on each rank, or split by training's tensor parallelism
        return _with_lora(copy, dtensors.full_tensor(parameter), factors, slice(None))
    ranks, shape = dtensors.shard_count(parameter), parameter.shape
    rows = -(-len(parameter) // ranks)
    values = _with_lora(copy, dtensors.local(parameter), factors, local_rows(parameter))
    shard = target.new_empty(rows, *shape[1:])  # the last ranks may have fewer rows; the others are padding
    shard[: len(values)].copy_(values)
    fits = copy.slice is None and rows * ranks == len(parameter)
    full = target if fits else target.new_empty(rows * ranks, *shape[1:])
    collectives.all_gather(full.view(-1), shard.view(-1), dtensors.shard_group(parameter))
    return full[: len(parameter)]


def _check_lora(path: str, layer: nn.Module) -> None:
    variant = bool(getattr(layer, "lora_variant", None)) or any(getattr(layer, "lora_bias", {}).values())
    if variant or not all(name in layer.lora_A for name in layer.active_adapters):  # type: ignore[operator, union-attr]
        raise ValueError(
            f"the adapter of {path} cannot be merged for generation: only plain LoRA on linear layers can, not DoRA, "
            "not LoRA with a bias; use plain LoRA"
        )
