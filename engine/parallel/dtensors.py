"""Parameters and gradients that may be DTensors: local shards, full tensors, sums over shards, a split head.

The mesh of a DTensor (`engine/parallel/meshes.py`) gives the ranks that have its shards. A plain tensor is full on
every rank.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from engine import kernels
from engine.parallel import collectives, dist, zero

Region = tuple[tuple[slice, ...], ...]
"""A region of a tensor: for each dimension one slice, or several that are concatenated (in one dimension at most)."""
_MeshDims = tuple[tuple[DeviceMesh, int], ...]  # (mesh, number of one of its dimensions)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_region(parameter: Tensor) -> Region:
    """Return the region of the full parameter that this rank holds.

    A tensor group splits first (engine/parallel/tensor.py). FSDP2 then cuts the rows of each rank's slice into chunks.
    """
    region = [[range(length)] for length in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, name in reversed(list(enumerate(mesh.mesh_dim_names or ()))):
            placement: Any = parameter.placements[dim]
            if not placement.is_replicate():
                # FSDP2 marks its chunks as strided if a tensor group split the same dimension. They are contiguous.
                blocks = getattr(placement, "split_factor", 1) if name == "tensor" else 1
                rank, size = mesh.get_local_rank(dim), mesh.size(dim)
                rows = _equal_blocks(region[placement.dim], blocks)
                region[placement.dim] = [_chunk(block, rank, size) for block in rows]
    return tuple(tuple(slice(rows.start, rows.stop) for rows in ranges) for ranges in region)


def _equal_blocks(ranges: list[range], count: int) -> list[range]:
    assert len(ranges) == 1, "a dimension in several ranges is not split again"
    length = len(ranges[0]) // count
    return [ranges[0][i * length : (i + 1) * length] for i in range(count)]


def _chunk(rows: range, rank: int, ranks: int) -> range:
    length = -(-len(rows) // ranks)
    return rows[rank * length : (rank + 1) * length]


def is_full(tensor: Tensor) -> bool:
    """Return whether the local shard is the full tensor."""
    return not _sharded_dims(tensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank. If the local shard is the full tensor, return it without a copy.

    Tensor parallelism splits before FSDP2 shards the rows, so the shards are joined first. `DTensor.full_tensor` does
    not support all of these placements in every version of torch.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if is_full(tensor):
        return local(tensor)
    shard = local(tensor).to(dist.world().device)  # NCCL cannot gather shards that offload has on the host
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    names = mesh.mesh_dim_names or ()
    split: Any = tensor.placements[names.index("tensor")] if "tensor" in names else Replicate()
    if not split.is_replicate() and split.dim == 0:
        rows //= mesh["tensor"].size()
    if (ranks := mesh["shard"].size()) > 1:
        missing = -(-rows // ranks) - len(shard)  # the last shards may be shorter
        if missing:
            shard = torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])])
        shard = collectives.gather_tensors(shard, mesh.get_group("shard"), kind="gather").flatten(0, 1)[:rows]
    if split.is_replicate():
        return shard
    matrices = getattr(split, "split_factor", 1)  # concatenated along the split dimension
    by_rank = collectives.gather_tensors(shard, mesh.get_group("tensor"), kind="gather")
    chunks = [each.chunk(matrices, split.dim) for each in by_rank]
    return torch.cat([of_rank[matrix] for matrix in range(matrices) for of_rank in chunks], split.dim)


def shard_rank(tensor: Tensor) -> int:
    """Return the number of this rank's shard of a tensor, as FSDP2 sharded it."""
    return tensor.device_mesh["shard"].get_local_rank() if isinstance(tensor, DTensor) else 0


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of full tensors of which each rank has shards: () fp64, equal on every rank."""
    norms = torch._foreach_norm([local(tensor) for tensor in tensors], dtype=torch.float32) if tensors else ()
    return sum_of_squares(list(zip(tensors, norms, strict=True)))


def sum_of_squares(norms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of squares of (tensor, norm of the local shard) over all shards: () fp64, equal on every rank.

    Every rank passes the same tensors in the same order.
    """
    device = dist.world().device
    total = torch.zeros((), dtype=torch.float64, device=device)
    groups: dict[tuple[_MeshDims, torch.device], list[Tensor]] = {}
    for tensor, norm in norms:
        groups.setdefault((_sharded_dims(tensor), norm.device), []).append(norm)
    for (dims, _), members in groups.items():
        squares = torch.stack(members).to(device, torch.float64).square().sum()
        for mesh, dim in dims:
            collectives.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    return total


def token_logprobs(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `targets` and entropies, (N,) fp32 each, from a full head or a split one.

    hidden: (N, D); weight: (V, D), or the head itself with its bias, which may be an FSDP unit; targets: (N,) int64;
    bias: (V,). `softcap` c bounds logits to c tanh(logit / c) (Gemma 2). For a split head, every rank of the group
    calls with the same hidden states, and in backward with the same upstream gradients. Formulas and precision:
    engine/kernels/token_logprobs.py. Raises ValueError if shapes do not fit or the temperature is not positive.
    """
    if isinstance(weight, nn.Module):
        head: Any = weight
        return zero.as_forward(
            head, lambda rows: token_logprobs(rows, head.weight, targets, temperature, head.bias, softcap), hidden
        )
    if not isinstance(weight, DTensor):
        return kernels.token_logprobs(hidden, weight, targets, temperature, bias, softcap)
    mesh, rows = weight.device_mesh, local(weight)
    group: Any = mesh.get_group()
    shard = kernels.VocabularyShard(
        mesh.get_local_rank() * len(rows),
        partial(collectives.all_reduce, group=group, op="max"),
        partial(collectives.all_reduce, group=group),
    )
    local_bias = None if bias is None else local(bias)
    return kernels.token_logprobs(hidden, rows, targets, temperature, local_bias, softcap, shard)


def _sharded_dims(tensor: Tensor) -> _MeshDims:
    """Return the mesh dimensions over which a tensor is sharded; none if it is full on each rank."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    sharded = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tuple((mesh, dim) for dim in sharded if mesh.size(dim) > 1)
