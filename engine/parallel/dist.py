"""Every collective of zerochat, and the process group under them. Nothing else calls `torch.distributed`'s collectives.

Ranks come from the environment (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`), as torchrun sets it;
without them there is one rank. GPUs talk through NCCL, hosts through Gloo.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """Who this process is. `device` is where its modules live."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """True on the one rank that writes what all ranks share."""
        return self.rank == 0


_world: World | None = None
_host_group: dist.ProcessGroup | None = None
_background_group: dist.ProcessGroup | None = None


def start(namespace: str = "zerochat", device: str | None = None) -> World:
    """Join the process group and say who we are.

    `namespace` prefixes the keys in the rendezvous store, so that several groups can follow one another on one store.
    `device` is "cpu" or "cuda"; by default CUDA where there is one.
    """
    global _world, _host_group, _background_group
    if _world is not None:
        return _world
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(kind)
    if kind == "cuda":
        # Slurm may show each rank its own card only; then that is number 0 for all of them.
        where = torch.device(kind, local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(where)
    store: dist.Store = dist.HashStore() if size == 1 else next(dist.rendezvous("env://", rank, size))[0]
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore(namespace, store),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=where if kind == "cuda" else None,
    )
    _host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    _background_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    _world = World(rank, size, local_rank, where)
    return _world


def stop() -> None:
    """Leave the process group. Safe to call twice."""
    global _world, _host_group, _background_group
    if _world is not None and dist.is_initialized():
        dist.destroy_process_group()
    _world = _host_group = _background_group = None


def world() -> World:
    """Who this process is; joins as a lone rank where nobody called `start`."""
    return _world if _world is not None else start()


def host_group() -> dist.ProcessGroup:
    """The Gloo group of numbers and objects on the host."""
    world()
    assert _host_group is not None
    return _host_group


def background_group() -> dist.ProcessGroup:
    """A Gloo group for a thread in the background (checkpoints): two threads on one group would wait for each other."""
    world()
    assert _background_group is not None
    return _background_group


def mesh(*, replicate: int, shard: int) -> DeviceMesh:
    """The device mesh (replicate, shard) of ZeRO; replicate * shard is the world size."""
    return init_device_mesh(world().device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over ranks, in place; returns the tensor."""
    if world().size > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Add up named numbers over ranks, in float64. Every rank passes the same names."""
    names = sorted(values)
    if world().size == 1 or not names:
        return dict(values)
    total = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
    dist.all_reduce(total, group=host_group())
    return dict(zip(names, total.tolist(), strict=True))


def max_over_ranks(value: float) -> float:
    """The largest of one number a rank."""
    if world().size == 1:
        return value
    highest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=host_group())
    return highest.item()


def gather_objects(value: Any) -> list[Any]:
    """One object a rank, in rank order, on every rank."""
    if world().size == 1:
        return [value]
    gathered: list[Any] = [None] * world().size
    dist.all_gather_object(gathered, value, group=host_group())
    return gathered


def broadcast_object(value: Any) -> Any:
    """Rank 0's object on every rank."""
    if world().size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=host_group())
    return box[0]


def barrier() -> None:
    """Wait until every rank is here."""
    if world().size > 1:
        dist.barrier(group=host_group())


def is_whole(tensor: Tensor) -> bool:
    """True where the local part of a tensor is all of it."""
    if not isinstance(tensor, DTensor):
        return True
    return all(
        not placement.is_shard() or size == 1
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor on every rank. Where the local part is whole it is returned itself, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    return local(tensor) if is_whole(tensor) else tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares over whole, possibly sharded tensors: () float32, the same number on every rank."""
    parts = [local(t) for t in tensors]
    device = world().device
    total = torch.zeros((), dtype=torch.float32, device=device)
    if parts:
        norms = torch._foreach_norm([p.float() if p.dtype != torch.float32 else p for p in parts])
        total += torch.stack([n.to(device) for n in norms]).square().sum()
    sharded = next((t for t in tensors if isinstance(t, DTensor)), None)
    if sharded is not None and not is_whole(sharded):
        all_reduce_sum(total, group=sharded.device_mesh.get_group("shard"))
    return total
