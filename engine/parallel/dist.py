"""The process group, this process among its ranks, and what ranks exchange on the host: numbers and objects.

The environment names the ranks as torchrun does: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`. An
environment without them means one rank. NCCL carries tensors on GPUs, Gloo carries tensors and objects on hosts.
`engine/parallel/collectives.py` has the collectives of tensors. No other file calls collectives of torch.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import psutil
import torch
import torch.distributed as dist

from engine.host_memory import reuse_freed_memory

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)
RANK_ZERO_TIMEOUT = timedelta(days=1)  # for work that only rank 0 does, such as tokenizing


@dataclass(frozen=True)
class World:
    """This process among the ranks. `device` is the device of its modules.

    `tensor` consecutive ranks share one module, or `sequence` consecutive ranks share the tokens of a row. The ranks of
    such a group get the same data. `pipeline` counts the stages of a model; the ranks of all stages get the same data
    too. Rank = (stage * data_size + data_rank) * group_size + rank in the group.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1

    @property
    def group_size(self) -> int:
        """The number of consecutive ranks that get the same data."""
        return self.tensor * self.sequence

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of the data."""
        return self.rank // self.group_size % self.data_size

    @property
    def data_size(self) -> int:
        """The number of shares of the data."""
        return self.size // (self.group_size * self.pipeline)

    @property
    def zero_size(self) -> int:
        """The number of ranks over which ZeRO shards a module. A tensor-parallel group counts as one rank."""
        return self.data_size * self.sequence

    @property
    def pipeline_rank(self) -> int:
        """The number of this rank's pipeline stage."""
        return self.rank // (self.data_size * self.group_size)

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that prints and writes for all."""
        return self.rank == 0


class CollectiveObserver(Protocol):
    """Learns which collective this rank calls, so that a watchdog can name the rank that others wait for."""

    def begin(self, name: str, shape: Sequence[int], /) -> None:
        """A collective is called. `shape` is that of this rank's tensor; empty for objects."""

    def end(self) -> None:
        """The collective has returned. An asynchronous one may still run."""


class observed:
    """A context in which this rank calls one collective."""

    __slots__ = ("_name", "_shape")

    def __init__(self, name: str, shape: Sequence[int] = ()) -> None:
        self._name, self._shape = name, shape

    def __enter__(self) -> None:
        if _observer is not None:
            _observer.begin(self._name, self._shape)

    def __exit__(self, *_: object) -> None:
        if _observer is not None:
            _observer.end()


_observer: CollectiveObserver | None = None
_world: World | None = None
_cache: dict[Any, Any] = {}
_groups: dict[str, dist.ProcessGroup] = {}  # Gloo groups of all ranks
_stop_requested_here = False
_stop_requested = False


def observe_collectives(observer: CollectiveObserver | None) -> None:
    """Call an observer before and after each collective of this process; None removes it."""
    global _observer
    _observer = observer


def start(namespace: str = "zerochat", device: str | None = None) -> World:
    """Join the process group.

    `namespace` prefixes the keys in the rendezvous store, so that one store serves several groups in turn. Torchrun's
    store also outlives a restart of the ranks, so its restart count is part of the prefix. `device` is "cpu" or "cuda";
    the default is CUDA if the machine has it.
    """
    global _world
    if _world is not None:
        return _world
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    own_device = torch.device(kind)
    if kind == "cpu":
        reuse_freed_memory()
    if kind == "cuda":
        # Slurm may show each rank its own GPU only; that GPU has number 0 on every rank.
        own_device = torch.device(kind, local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(own_device)
    store: dist.Store = dist.HashStore() if size == 1 else next(dist.rendezvous("env://", rank, size))[0]
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    store = dist.PrefixStore(namespace, store)
    _choose_interface(store, rank, size)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=own_device if kind == "cuda" else None,
    )
    for name, timeout in {"host": TIMEOUT, "background": TIMEOUT, "patient": RANK_ZERO_TIMEOUT}.items():
        _groups[name] = dist.new_group(backend="gloo", timeout=timeout)
    _world = World(rank, size, local_rank, own_device)
    return _world


def _choose_interface(store: dist.Store, rank: int, size: int) -> None:
    """Set the network interface of Gloo, unless the environment variable GLOO_SOCKET_IFNAME names one.

    Gloo's own choice is the address of the host's name. On many machines this is 127.0.1.1, which other machines cannot
    reach. Here each rank takes the interface with the route to the first rank's machine. The last rank resolves the
    name of this machine for all ranks, because the machine itself may resolve it to 127.0.1.1.
    """
    if size == 1:
        return
    if rank == size - 1:
        family, _, _, _, place = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_DGRAM)[0]
        store.set("address", f"{int(family)} {place[0]}")
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    family_number, address = store.get("address").decode().split()
    with socket.socket(socket.AddressFamily(int(family_number)), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in (each.address.partition("%")[0] for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            if rank == 0 and not own.startswith("127.") and own != "::1":
                print(f"engine: Gloo uses {name} ({own}); GLOO_SOCKET_IFNAME selects another interface", flush=True)


def stop() -> None:
    """Leave the process group. A second call does nothing."""
    global _world, _stop_requested_here, _stop_requested
    if _world is not None and dist.is_initialized():
        dist.destroy_process_group()
    _world = None
    _stop_requested_here = _stop_requested = False
    _groups.clear()
    _cache.clear()


def world() -> World:
    """Return this process among the ranks. Joins the process group if `start` was not called."""
    return _world if _world is not None else start()


def set_parallelism(*, tensor: int = 1, pipeline: int = 1, sequence: int = 1) -> World:
    """Set how many ranks share one module or one row, for all engines of this process. Every rank calls.

    Raises ValueError if the product does not divide the number of ranks.
    """
    global _world
    current = world()
    if current.size % (tensor * pipeline * sequence):
        sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "sequence_parallel": sequence}
        product = " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
        raise ValueError(f"{product} does not divide the {current.size} ranks. Use a divisor of {current.size}")
    _world = replace(current, tensor=tensor, pipeline=pipeline, sequence=sequence)
    return _world


def check_parallelism(*, tensor: int, pipeline: int, sequence: int) -> None:
    """Raise ValueError if another engine has changed the parallelism of this process."""
    current = world()
    if (current.tensor, current.pipeline, current.sequence) != (tensor, pipeline, sequence):
        raise ValueError(
            "another engine of this process has other values of tensor_parallel, pipeline_parallel or "
            "sequence_parallel. Use the same values for all engines"
        )


def cached(key: Any, make: Callable[[], T]) -> T:
    """Return what `make` returned at the first call with this key since `start`."""
    if key not in _cache:
        _cache[key] = make()
    value: T = _cache[key]
    return value


def host_group(name: Literal["host", "background", "patient"] = "host") -> dist.ProcessGroup:
    """Return a Gloo group of all ranks for numbers and objects on the host.

    "background" is for a thread (checkpoints), because two threads on one group would deadlock. "patient" waits a day.
    """
    world()
    return _groups[name]


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Return a new group of some ranks. Every rank calls."""
    return dist.new_group(ranks, timeout=TIMEOUT)


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Return the sums of named numbers over the shares of the data, in float64. Every rank passes the same names.

    Ranks with the same share have the same numbers, which count once. The same message carries stop requests.
    """
    global _stop_requested
    if world().size == 1:
        _stop_requested |= _stop_requested_here
        return dict(values)
    names = sorted(values)
    counts = world().rank % world().group_size == 0 and world().pipeline_rank == 0
    own = [float(values[name]) if counts else 0.0 for name in names]
    total = torch.tensor([*own, float(_stop_requested_here)], dtype=torch.float64)
    with observed("sum_over_ranks", total.shape):
        dist.all_reduce(total, group=host_group())
    *sums, requests = total.tolist()
    _stop_requested |= requests > 0
    return dict(zip(names, sums, strict=True))


def max_over_ranks(value: float) -> float:
    """Return the largest of one number per rank."""
    if world().size == 1:
        return value
    highest = torch.tensor([value], dtype=torch.float64)
    with observed("max_over_ranks", highest.shape):
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=host_group())
    return highest.item()


def gather_objects(value: Any) -> list[Any]:
    """Return the objects of all ranks in rank order, on every rank."""
    if world().size == 1:
        return [value]
    gathered: list[Any] = [None] * world().size
    with observed("gather_objects"):
        dist.all_gather_object(gathered, value, group=host_group())
    return gathered


def broadcast_object(
    value: Any, *, source: int = 0, group: dist.ProcessGroup | None = None, patient: bool = False
) -> Any:
    """Return the object of rank `source` of a group (default: of all ranks) on every rank of the group.

    `patient`: the ranks wait up to a day for rank 0, which may work for all ranks first.
    """
    if world().size == 1:
        return value
    objects = [value]
    with observed("broadcast_object"):
        group = group or host_group("patient" if patient else "host")
        dist.broadcast_object_list(objects, group=group, group_src=source)
    return objects[0]


def barrier() -> None:
    """Wait until every rank has called this."""
    if world().size > 1:
        with observed("barrier"):
            dist.barrier(group=host_group())


def request_stop() -> None:
    """Request that all ranks stop. A signal handler may call this.

    The next `sum_over_ranks`, which every update calls, sends the request to all ranks. All stop after the same step.
    """
    global _stop_requested_here
    _stop_requested_here = True


def stop_requested() -> bool:
    """Return whether a rank had requested a stop at the last `sum_over_ranks`: the same on all ranks until the next."""
    return _stop_requested
