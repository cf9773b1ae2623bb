"""Weight sync: copy a training module's parameters into the memory of an inference model.

Each rank reads its own rows of a parameter, adds its rows of the LoRA update in fp32, and casts the sum to the
inference precision once. One all-gather exchanges the rows of many parameters. A bucket holds the rows of one
all-gather from all ranks. Two buckets exist at a time: one is gathered while the next is packed.

`live_parameters` maps each parameter name of the inference model to the live parameter. `tensor_parallel_slices` splits
an inference model over ranks by the plan of training (`engine/parallel/tensor.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.full_parameters import LoraFactors, lora_factors, lora_update
from engine.loading import local_rows
from engine.parallel import dist, dtensors, meshes, tensor

BUCKET_BYTES = 64 << 20  # total over ranks


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

    def write(self, rows: Tensor, first: int, target: Tensor) -> None:
        """Copy the values of this slice from `rows` to `target`. `rows` begin at row `first` of the full tensor."""
        if self.dim > 0:
            target[first : first + len(rows)].copy_(self.of(rows))
            return
        assert self.blocks == 1, "fused matrices are never split along the dimension of their rows"
        begin = self.index * len(target)
        low, high = max(first, begin), min(first + len(rows), begin + len(target))
        if low < high:
            target[low - begin : high - begin].copy_(rows[low - first : high - first])


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

    def write(self, rows: Tensor, first: int) -> None:
        """Copy rows into the target; they begin at row `first` of the full parameter."""
        if self.slice is None:
            self.target[first : first + len(rows)].copy_(rows)
        else:
            self.slice.write(rows, first, self.target)


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
    sharded_by_rows = []
    for copy in copies:
        if dtensors.is_row_sharded(copy.parameter):
            sharded_by_rows.append(copy)
        else:  # full on each rank, or split by training's tensor parallelism
            full = dtensors.full_tensor(copy.parameter)
            copy.write(_with_lora(copy, full, factors, slice(None)), 0)
    in_flight: tuple[list[_ShardRows], dtensors.Gathering] | None = None
    for bucket in _buckets(sharded_by_rows):
        gathering = dtensors.start_all_gather(_pack_bucket(bucket, factors), bucket[0].copy.parameter)
        if in_flight is not None:
            _write_bucket(*in_flight)
        in_flight = bucket, gathering
    if in_flight is not None:
        _write_bucket(*in_flight)
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


@dataclass(frozen=True)
class _ShardRows:
    """Rows [begin, end) of every rank's shard of a parameter. The last ranks may have fewer rows."""

    copy: WeightCopy
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return (self.end - self.begin) * _row_numel(self.copy.parameter)

    def of_rank(self, rank: int) -> slice:
        """The rows of the full parameter that a rank contributes."""
        shard, rows = rank * _rows_per_rank(self.copy.parameter), len(self.copy.parameter)
        return slice(min(shard + self.begin, rows), min(shard + self.end, rows))


def _rows_per_rank(parameter: Tensor) -> int:
    return -(-len(parameter) // dtensors.shard_count(parameter))


def _row_numel(parameter: Tensor) -> int:
    return parameter.numel() // len(parameter)


def _buckets(copies: Sequence[WeightCopy]) -> Iterator[list[_ShardRows]]:
    """Yield the rows of each all-gather: rows of several small parameters, or some rows of a large one."""
    bucket: list[_ShardRows] = []
    free = limit = 0  # numbers per rank
    for copy in copies:
        limit = BUCKET_BYTES // (dtensors.shard_count(copy.parameter) * copy.target.element_size())
        rows, width = _rows_per_rank(copy.parameter), _row_numel(copy.parameter)
        step = max(1, limit // width)
        for begin in range(0, rows, step):
            chunk = _ShardRows(copy, begin, min(begin + step, rows))
            if bucket and chunk.numel > free:
                yield bucket
                bucket = []
            free = (free if bucket else limit) - chunk.numel
            bucket.append(chunk)
    if bucket:
        yield bucket


def _pack_bucket(bucket: Sequence[_ShardRows], factors: Factors) -> Tensor:
    """Return this rank's rows of a bucket as one flat tensor, each parameter padded to the first rank's rows."""
    target = bucket[0].copy.target
    flat = torch.empty(sum(chunk.numel for chunk in bucket), dtype=target.dtype, device=target.device)
    offset = 0
    for chunk in bucket:
        shard = local_rows(chunk.copy.parameter)
        rows = chunk.of_rank(dtensors.shard_rank(chunk.copy.parameter))
        values = dtensors.local(chunk.copy.parameter)[rows.start - shard.start : rows.stop - shard.start]
        values = _with_lora(chunk.copy, values, factors, rows)
        flat[offset : offset + values.numel()].view(values.shape).copy_(values)
        offset += chunk.numel
    return flat


def _write_bucket(bucket: Sequence[_ShardRows], gathering: dtensors.Gathering) -> None:
    """Wait for a bucket and copy each rank's rows into the targets."""
    gathered = gathering.wait()  # (ranks, numbers)
    offset = 0
    for chunk in bucket:
        width = _row_numel(chunk.copy.parameter)
        for rank, flat in enumerate(gathered):
            rows = chunk.of_rank(rank)
            values = flat[offset : offset + (rows.stop - rows.start) * width]
            chunk.copy.write(values.view(-1, *chunk.copy.parameter.shape[1:]), rows.start)
        offset += chunk.numel


def _check_lora(path: str, layer: nn.Module) -> None:
    variant = bool(getattr(layer, "lora_variant", None)) or any(getattr(layer, "lora_bias", {}).values())
    if variant or not all(name in layer.lora_A for name in layer.active_adapters):  # type: ignore[operator, union-attr]
        raise ValueError(
            f"the adapter of {path} cannot be merged for generation: only plain LoRA on linear layers can, not DoRA, "
            "not LoRA with a bias; use plain LoRA"
        )
