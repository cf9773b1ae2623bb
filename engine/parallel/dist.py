"""Every collective of zerochat, and the process group under them. Nothing else calls `torch.distributed`'s collectives.

Ranks come from the environment (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`), as torchrun sets it;
without them there is one rank. GPUs talk through NCCL, hosts through Gloo.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from engine.host_allocator import reuse_freed_memory
from engine.parallel import rank_errors, stop_signal
from engine.parallel.comm_stats import count, count_all_reduce

Made = TypeVar("Made")
TIMEOUT = timedelta(minutes=30)
PATIENCE = timedelta(days=1)  # with what the first rank makes for all


@dataclass(frozen=True)
class World:
    """Who this process is. `device` is where its modules live.

    `mates` neighbouring ranks see the same data: `tensor` ranks that hold one module between them, or `sequence` ranks
    that hold the tokens of a row. Data is spread over `data_size` such groups. All that once more for each of the
    `pipeline` pieces of a model: ranks that hold pieces of one see the same data too, and stand `data_size * mates`
    apart.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1

    @property
    def mates(self) -> int:
        """How many neighbouring ranks see the same data."""
        return self.tensor * self.sequence

    @property
    def data_rank(self) -> int:
        """Which share of the data is this rank's."""
        return self.rank // self.mates % self.data_size

    @property
    def data_size(self) -> int:
        """In how many shares data is cut."""
        return self.size // (self.mates * self.pipeline)

    @property
    def zero_size(self) -> int:
        """Over how many ranks ZeRO lays a module out, a tensor group counted once."""
        return self.data_size * self.sequence

    @property
    def pipeline_rank(self) -> int:
        """Which piece of a model is this rank's."""
        return self.rank // (self.data_size * self.mates)

    @property
    def leads(self) -> bool:
        """True on the one rank that writes what all ranks share."""
        return self.rank == 0


_world: World | None = None
_meshes: dict[tuple[int, ...], DeviceMesh] = {}
_made: dict[str, Any] = {}
_host_group: dist.ProcessGroup | None = None
_store: dist.Store | None = None
_background_group: dist.ProcessGroup | None = None


def start(namespace: str = "zerochat", device: str | None = None) -> World:
    """Join the process group and say who we are.

    `namespace` prefixes the keys in the rendezvous store, so that several groups can follow one another on one store.
    `device` is "cpu" or "cuda"; by default CUDA where there is one.
    """
    global _world, _host_group, _background_group, _store
    if _world is not None:
        return _world
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(kind)
    if kind == "cpu":
        reuse_freed_memory()
    if kind == "cuda":
        # Slurm may show each rank its own card only; then that is number 0 for all of them.
        where = torch.device(kind, local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(where)
    store: dist.Store = dist.HashStore() if size == 1 else next(dist.rendezvous("env://", rank, size))[0]
    _store = dist.PrefixStore(f"{namespace} waits", store)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore(namespace, store),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=where if kind == "cuda" else None,
    )
    if size > 1:
        rank_errors.install(dist.PrefixStore(namespace, store), rank)
    _host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    _background_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    _world = World(rank, size, local_rank, where)
    return _world


def stop() -> None:
    """Leave the process group. Safe to call twice."""
    global _world, _host_group, _background_group, _store
    if _world is not None and dist.is_initialized():
        dist.destroy_process_group()
    _world = _host_group = _background_group = _store = None
    _meshes.clear()
    _made.clear()
    stop_signal.forget()


def arrange(*, tensor: int = 1, pipeline: int = 1, sequence: int = 1) -> World:
    """Put every `tensor` (or `sequence`) neighbouring ranks, and the ranks of all `pipeline` pieces, on the same data.

    For the whole process: engines that live side by side have the same arrangement. Collective where it is a new one.
    Raises ValueError where the world does not divide by it.
    """
    global _world
    now = world()
    if now.size % (tensor * pipeline * sequence):
        sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "sequence_parallel": sequence}
        asked = [f"{key}={size}" for key, size in sizes.items() if size > 1]
        raise ValueError(f"{' x '.join(asked)} does not divide the {now.size} ranks")
    _world = replace(now, tensor=tensor, pipeline=pipeline, sequence=sequence)
    if sequence > 1:
        sequence_group()  # made here, where all ranks are, and not in the middle of a pass
    return _world


def world() -> World:
    """Who this process is; joins as a lone rank where nobody called `start`."""
    return _world if _world is not None else start()


def once(name: str, make: Callable[[], Made]) -> Made:
    """What `make` gave when it was first asked for in this process group."""
    if name not in _made:
        _made[name] = make()
    found: Made = _made[name]
    return found


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
    """The device mesh (replicate, shard); behind these `tensor` where ranks form such groups, before them `pipeline`.

    replicate * shard is `zero_size`. One mesh for each shape: what is laid out on parts of it can be composed.
    """
    sizes = {"pipeline": world().pipeline, "replicate": replicate, "shard": shard, "tensor": world().tensor}
    shown = {name: size for name, size in sizes.items() if size > 1 or name in ("replicate", "shard")}
    key = tuple(sizes.values())
    if key not in _meshes:
        _meshes[key] = init_device_mesh(world().device.type, tuple(shown.values()), mesh_dim_names=tuple(shown))
    return _meshes[key]


def sequence_group() -> dist.ProcessGroup:
    """The ranks that hold the tokens of this rank's rows. No mesh's: one over all ranks has the group that ZeRO has."""
    ranks = world().sequence

    def make() -> dist.ProcessGroup:
        firsts = range(0, world().size, ranks)
        groups = [dist.new_group([*range(first, first + ranks)], timeout=TIMEOUT) for first in firsts]
        return groups[world().rank // ranks]

    return once(f"sequence {ranks}", make)


def neighbours(ranks: int) -> DeviceMesh:
    """The mesh (tensor,) of this rank's group, where every `ranks` neighbouring ranks are one.

    Raises ValueError where the world does not divide by it.
    """
    size = world().size
    if size % ranks:
        raise ValueError(f"tensor_parallel={ranks} does not divide the {size} ranks")

    def make() -> DeviceMesh:
        shape = (size // ranks, ranks)
        return init_device_mesh(world().device.type, shape, mesh_dim_names=("group", "tensor"))

    return once(f"neighbours {ranks}", make)["tensor"]


def along_pipeline() -> dist.ProcessGroup:
    """The ranks that hold the pieces of this rank's model, in the pieces' order."""
    return mesh(replicate=world().data_size, shard=1).get_group("pipeline")


def ends_of_pipeline() -> dist.ProcessGroup | None:
    """The first and the last of them; None on the ranks in between. Every rank calls."""
    now = world()
    apart = now.size // now.pipeline
    pairs = [[rank, now.size - apart + rank] for rank in range(apart)]
    ends = once(f"ends {now.pipeline}", lambda: DeviceMesh(now.device.type, pairs, mesh_dim_names=("column", "ends")))
    return ends.get_group("ends") if now.pipeline_rank in (0, now.pipeline - 1) else None


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over ranks, in place; returns the tensor."""
    if world().size > 1:
        count_all_reduce("other", tensor, group.size() if group is not None else world().size)
        dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_max(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The largest over ranks, elementwise, in place; returns the tensor."""
    if world().size > 1:
        count_all_reduce("other", tensor, group.size() if group is not None else world().size)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def gather_tensors(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's tensor, in rank order; all have the same shape."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def all_gather(
    output: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """The group's tensors one after another in `output`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
    work: dist.Work | None = gather(output, mine, group=group, async_op=async_op)
    return work


def reduce_scatter(
    output: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any, *, async_op: bool = False
) -> dist.Work | None:
    """This rank's part of the sum (or mean) of the group's tensors in `output`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name from torch 2.13 on
    work: dist.Work | None = scatter(output, whole, op=op, group=group, async_op=async_op)
    return work


def all_to_all(received: Tensor, parts: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Part r of `parts` goes to rank r of the group; what they sent here stands in `received`, in their order."""
    dist.all_to_all_single(received, parts, group=group)


def meet(group: dist.ProcessGroup) -> None:
    """Wait until every rank of a training group is here. Unlike `barrier`, part of the pass that it stands in."""
    dist.all_reduce(torch.zeros(1, dtype=torch.int32), group=group)


def average(tensors: Sequence[Tensor], *, bucket: int) -> None:
    """The mean over all ranks, in place, in collectives of about `bucket` numbers."""
    if world().size == 1:
        return
    waiting: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        waiting.append(tensor)
        if index + 1 == len(tensors) or sum(t.numel() for t in waiting) >= bucket:
            flat = torch.cat([t.reshape(-1) for t in waiting]).div_(world().size)
            count_all_reduce("reduce", flat, world().size)
            dist.all_reduce(flat)
            for one, mean in zip(waiting, flat.split([t.numel() for t in waiting]), strict=True):
                one.copy_(mean.view(one.shape))
            waiting = []


def exchange_rows(rows: Tensor) -> Tensor:
    """Row r of `rows` (ranks, bytes) goes to rank r: (ranks, bytes), what came here."""
    count("reduce", rows[0].nbytes * (len(rows) - 1))
    received = torch.empty_like(rows)
    all_to_all(received, rows)
    return received


def gather_rows(row: Tensor) -> Tensor:
    """Every rank's `row` (1, bytes): (ranks, bytes)."""
    count("reduce", row.nbytes * (world().size - 1))
    rows = row.new_empty(world().size, row.shape[1])
    all_gather(rows.view(-1), row.view(-1))
    return rows


def rank_rows(mine: Tensor) -> Tensor:
    """Rows (1, n) that each rank has for itself as one tensor (ranks, n), so that a checkpoint keeps all of them."""
    everyone = mesh(replicate=world().zero_size, shard=1)["replicate"]
    return DTensor.from_local(mine, everyone, [Shard(0)], run_check=False)


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Add up named numbers over the shares of the data, in float64. Every rank passes the same names.

    Ranks that have the same share (mates, pieces of a model) have the same numbers; these count once. Whether
    any rank asks to stop (stop_signal.py) all know then.
    """
    names = sorted(values)
    if world().size == 1:
        stop_signal.learn(stop_signal.asked_here())
        return dict(values)
    first = world().rank % world().mates == 0 and world().pipeline_rank == 0
    mine = [float(values[name]) if first else 0.0 for name in names]
    total = torch.tensor([*mine, float(stop_signal.asked_here())], dtype=torch.float64)
    dist.all_reduce(total, group=host_group())
    *sums, asking = total.tolist()
    stop_signal.learn(asking > 0)
    return dict(zip(names, sums, strict=True))


def max_over_ranks(value: float) -> float:
    """The largest of one number a rank."""
    if world().size == 1:
        return value
    highest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=host_group())
    return highest.item()


def mean_over_ranks(value: float) -> float:
    """The mean of one number a rank, in float64; not finite where one of them is not."""
    if world().size == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=host_group())
    return total.item() / world().size


def gather_objects(value: Any) -> list[Any]:
    """One object a rank, in rank order, on every rank."""
    if world().size == 1:
        return [value]
    gathered: list[Any] = [None] * world().size
    dist.all_gather_object(gathered, value, group=host_group())
    return gathered


def broadcast_object(value: Any, *, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """One rank's object on every rank of a group (of all by default); `source` is its rank there."""
    if world().size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group or host_group(), group_src=source)
    return box[0]


def broadcast(tensor: Tensor, *, source: int, group: dist.ProcessGroup) -> Tensor:
    """One rank's contiguous tensor on every rank of a group, in place; `source` is its rank there."""
    if group.rank() == source:
        count("other", tensor.nbytes * (group.size() - 1))
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def from_first(make: Callable[[], Made]) -> Made:
    """What the first rank makes, on every rank. The others wait, longer than they would in a collective."""
    if world().size == 1:
        return make()
    assert _store is not None
    made, key = None, f"made {_store.add(f'asked {world().rank}', 1)}"  # every rank has asked equally often
    if world().leads:
        made = make()
        _store.set(key, "")
    else:
        _store.wait([key], PATIENCE)
    found: Made = broadcast_object(made)
    return found


def barrier() -> None:
    """Wait until every rank is here."""
    if world().size > 1:
        dist.barrier(group=host_group())
