"""Tensors that lie over ranks: the part of one that is ours, the whole of it, and sums over all its parts.

What says how a tensor lies is its DTensor mesh, whose dimensions are named by `dist.mesh`; a plain tensor is whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engine.parallel import dist
from engine.parallel.comm_stats import count

_Dims = tuple[tuple[DeviceMesh, int], ...]  # a mesh and which of its dimensions, each


def is_whole(tensor: Tensor) -> bool:
    """True where the local part of a tensor is all of it."""
    return not _spread(tensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor on every rank. Where the local part is whole it is returned itself, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    if is_whole(tensor):
        return local(tensor)
    return _joined(tensor) if "tensor" in (tensor.device_mesh.mesh_dim_names or ()) else tensor.full_tensor()


def _joined(tensor: DTensor) -> Tensor:
    """A tensor that a tensor group split before FSDP2 cut the rows of each part, put together the other way round.

    By hand: DTensor takes other ways in other versions of torch, and does not always find one.
    """
    part, mesh = local(tensor), tensor.device_mesh
    last: Any = tensor.placements[-1]
    rows = tensor.shape[0]
    if not last.is_replicate() and last.dim == 0:
        rows //= mesh["tensor"].size()
    if (cut := mesh["shard"].size()) > 1:
        padded = part.new_zeros(-(-rows // cut), *part.shape[1:])
        padded[: len(part)] = part
        part = torch.cat(dist.gather_tensors(padded, mesh.get_group("shard")))[:rows]
    if last.is_replicate():
        return part
    dim, pieces = last.dim, getattr(last, "split_factor", 1)
    columns = [each.chunk(pieces, dim) for each in dist.gather_tensors(part, mesh.get_group("tensor"))]
    return torch.cat([column[piece] for piece in range(pieces) for column in columns], dim)


def in_rows(tensor: Tensor) -> bool:
    """True for a tensor that is cut over the ranks of one group by its first dimension, as FSDP2 does, and no other."""
    if not isinstance(tensor, DTensor):
        return False
    cuts = [p for p, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if p.is_shard() and size > 1]
    return len(cuts) == 1 and type(cuts[0]) is Shard and cuts[0].dim == 0 and shards(tensor) > 1


def shards(tensor: Tensor) -> int:
    """Over how many ranks FSDP2 cut a tensor."""
    if not isinstance(tensor, DTensor) or "shard" not in (tensor.device_mesh.mesh_dim_names or ()):
        return 1
    return tensor.device_mesh["shard"].size()


def shard_rank(tensor: Tensor) -> int:
    """Which of FSDP2's shards of a tensor this rank has."""
    return tensor.device_mesh["shard"].get_local_rank() if isinstance(tensor, DTensor) else 0


@dataclass(frozen=True)
class Gathering:
    """An all-gather on its way. `mine` is held until it has arrived."""

    mine: Tensor
    parts: Tensor
    work: Any

    def wait(self) -> Tensor:
        """(ranks, numbers): what each rank of the group sent."""
        if self.work is not None:
            self.work.wait()
        return self.parts


def start_all_gather(mine: Tensor, like: Tensor) -> Gathering:
    """Send `mine` (numbers,) to all ranks that hold shards of the sharded tensor `like`; they all send as many."""
    assert isinstance(like, DTensor)
    group = like.device_mesh.get_group("shard")
    parts = mine.new_empty(shards(like), len(mine))
    count("gather", mine.nbytes * (len(parts) - 1))
    return Gathering(mine, parts, dist.all_gather(parts.view(-1), mine, group=group, async_op=True))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares over whole, possibly sharded tensors: () float32, the same number on every rank."""
    device = dist.world().device
    total = torch.zeros((), dtype=torch.float32, device=device)
    by_spread: dict[_Dims, list[Tensor]] = {}
    for tensor in tensors:
        by_spread.setdefault(_spread(tensor), []).append(local(tensor))
    for dims, parts in by_spread.items():
        norms = torch._foreach_norm([p.float() if p.dtype != torch.float32 else p for p in parts])
        squares = torch.stack([n.to(device) for n in norms]).square().sum()
        for mesh, dim in dims:
            dist.all_reduce_sum(squares, group=mesh.get_group(dim))
        total += squares
    return total


def _spread(tensor: Tensor) -> _Dims:
    """The mesh dimensions over which a tensor is in parts; none of one that is whole on each rank."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    cuts = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tuple((mesh, dim) for dim in cuts if mesh.size(dim) > 1)


def sum_over_parts(numbers: Sequence[tuple[Tensor, float]]) -> float:
    """The sum of (tensor, a number of our part of it) over all parts, in float64, the same on every rank.

    Every rank passes the same tensors in the same order.
    """
    sums: dict[_Dims, float] = {}
    for tensor, number in numbers:
        dims = _spread(tensor)
        sums[dims] = sums.get(dims, 0.0) + number
    total = 0.0
    for dims, number in sums.items():
        value = torch.tensor(number, dtype=torch.float64, device=dist.world().device)
        for mesh, dim in dims:
            dist.all_reduce_sum(value, group=mesh.get_group(dim))
        total += value.item()
    return total


def laid_out_like(parameter: Tensor, part: Tensor) -> Tensor:
    """A tensor over the ranks as `parameter` is, of which `part` is ours, on the host or where the parameter is."""
    if not isinstance(parameter, DTensor):
        return part.view(parameter.shape)
    mesh = parameter.device_mesh
    if part.device.type != mesh.device_type:
        mesh = _host_mesh(mesh)
    return DTensor.from_local(
        part.view(local(parameter).shape),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@cache
def _host_mesh(there: DeviceMesh) -> DeviceMesh:
    return DeviceMesh("cpu", there.mesh, mesh_dim_names=there.mesh_dim_names)
