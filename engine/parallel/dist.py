"""The process group, this process among its ranks, and what ranks exchange on the host: numbers and objects.

The environment names the ranks as torchrun does: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`. An
environment without them means one rank. NCCL carries tensors and numbers between GPUs, and Gloo between CPUs. On GPUs,
Gloo serves the background thread that saves checkpoints, and ranks that wait for an object of rank 0: a waiting NCCL
collective would keep the GPU busy. `engine/parallel/collectives.py` has the collectives of tensors. No other file calls
collectives of torch.
"""

import os
import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from engine.host_memory import reuse_freed_memory, to_device

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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


_observe: Callable[[str, Sequence[int]], AbstractContextManager[None]] | None = None
_observe_work: Callable[[], None] | None = None
_world: World | None = None
_cache: dict[Any, Any] = {}
_stop_requested_here = False
_stop_requested = False


def observe_collectives(observe: Callable[[str, Sequence[int]], AbstractContextManager[None]] | None) -> None:
    """Enter the context `observe(name, shape)` around each collective, so that a watchdog can name the one it is in.

    The shape is that of this rank's tensor; it is empty for objects. An asynchronous collective may still run after the
    context.
    """
    global _observe
    _observe = observe


def observed(name: str, shape: Sequence[int] = ()) -> AbstractContextManager[None]:
    """Return the context in which this rank calls a collective."""
    return nullcontext() if _observe is None else _observe(name, shape)


def observe_work(observe: Callable[[], None] | None) -> None:
    """Call `observe()` after each micro-batch, decode step and loaded parameter, so that a watchdog sees long work."""
    global _observe_work
    _observe_work = observe


def note_work() -> None:
    """Note that this rank has finished a part of its work."""
    if _observe_work is not None:
        _observe_work()


def start(namespace: str = "zerochat", device: str | None = None) -> World:
    """Join the process group. If the caller has initialized torch's default group, use that one.

    `namespace` prefixes the keys in the rendezvous store, so that one store serves several groups in turn. Torchrun's
    store also outlives a restart of the ranks, so its restart count is part of the prefix. `device` is "cpu" or "cuda";
    the default is CUDA if the machine has it.
    """
    global _world
    if _world is not None:
        return _world
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    own_device = torch.device(kind)
    if kind == "cpu":
        reuse_freed_memory()
    if kind == "cuda":
        # Slurm may show each rank its own GPU only; that GPU has number 0 on every rank.
        own_device = torch.device(kind, local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(own_device)
        # By default, cuBLAS may add the parts of a long sum in the precision of the inputs.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        # cuDNN's attention would build an execution plan for each new shape. Almost every micro-batch has one.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not dist.is_initialized():
        _init_process_group(namespace, own_device)
        _cache["is_own"] = True
    _cache["checkpoints"] = dist.new_group(backend="gloo", timeout=TIMEOUT)
    _cache["objects"] = dist.new_group(backend="gloo", timeout=RANK_ZERO_TIMEOUT)
    _world = World(dist.get_rank(), dist.get_world_size(), local_rank, own_device)
    return _world


def _init_process_group(namespace: str, device: torch.device) -> None:
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    # From torch 2.15, "nccl" is an implementation without a pipe for the flight recorder, unless this is 0.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    store: dist.Store = dist.HashStore() if size == 1 else next(dist.rendezvous("env://", rank, size))[0]
    if rank == size - 1:  # the other ranks wait for this one in `_choose_interface`
        _delete_dump_signal(store)
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    store = dist.PrefixStore(namespace, store)
    _choose_interface(store, rank, size)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        # NCCL connects the ranks now. One rank would get a communicator that takes memory and fails on some machines.
        device_id=device if device.type == "cuda" and size > 1 else None,
    )


def _delete_dump_signal(store: dist.Store) -> None:
    """Delete the signal that NCCL wrote to this store after an error of an earlier attempt.

    NCCL writes the key without the prefixes of its store and never deletes it. Ranks that find the signal write their
    flight recorder, and their process ends eight minutes later (`HeartbeatMonitor` in ProcessGroupNCCL.cpp).
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store.delete_key("exception_dump")


def _choose_interface(store: dist.Store, rank: int, size: int) -> None:
    """Set the network interface of Gloo and NCCL, each unless its environment variable (SOCKET_VARIABLES) names one.

    Gloo's own choice is the address of the host's name. On many machines this is 127.0.1.1, which other machines cannot
    reach. NCCL's own choice is the first interface, which may belong to containers. Here each rank takes the interface
    with the route to the first rank's machine. The last rank resolves the name of this machine for all ranks, because
    the machine itself may resolve it to 127.0.1.1.
    """
    if size == 1:
        return
    if rank == size - 1:
        family, _, _, _, place = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_DGRAM)[0]
        store.set("address", f"{int(family)} {place[0]}")
    family_number, address = store.get("address").decode().split()
    with socket.socket(socket.AddressFamily(int(family_number)), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in (each.address.partition("%")[0] for each in addresses):
            chosen = [os.environ.setdefault(variable, name) for variable in SOCKET_VARIABLES]
            if rank == 0 and not own.startswith("127.") and own != "::1":
                settings = ", ".join(f"{key}={value}" for key, value in zip(SOCKET_VARIABLES, chosen, strict=True))
                print(f"engine: the route between ranks leads through {name} ({own}); {settings}", flush=True)
            return


def release_before_stop(graphs: Any) -> None:
    """Call `graphs.release()` in `stop`, unless `graphs` was freed before.

    NCCL destroys a communicator only after the CUDA graphs that use it (`commDestroySync` in NCCL's init.cc), and would
    wait without end for a graph that Python still holds.
    """
    cached("graphs", WeakSet).add(graphs)


def stop() -> None:
    """Leave the process group; one that the caller has initialized stays. A second call does nothing."""
    global _world, _stop_requested_here, _stop_requested
    for graphs in _cache.get("graphs", ()):
        graphs.release()
    if _cache.get("is_own") and dist.is_initialized():
        dist.destroy_process_group()
    _world = None
    _stop_requested_here = _stop_requested = False
    _cache.clear()


def world() -> World:
    """Return this process among the ranks. Joins the process group if `start` was not called."""
    return _world if _world is not None else start()


def is_rank_zero() -> bool:
    """Return True on the one rank that prints and writes for all."""
    return world().rank == 0


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


def check_unchanged(before: World) -> None:
    """Raise ValueError if another engine has changed the parallelism of this process since then."""
    if world() != before:
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


def checkpoint_group() -> dist.ProcessGroup:
    """Return the Gloo group of checkpoints, which a background thread uses. Two threads on one group would deadlock."""
    world()
    group: dist.ProcessGroup = _cache["checkpoints"]
    return group


def subgroup(members: list[list[int]]) -> dist.ProcessGroup:
    """Divide all ranks into new groups with these members, and return this rank's group. Every rank calls."""
    return dist.new_subgroups_by_enumeration(members, timeout=TIMEOUT)[0]


def reduce_over_ranks(
    sums: Sequence[float | Tensor], maxima: Sequence[float | Tensor] = ()
) -> tuple[list[float], list[float]]:
    """Return the sums of numbers over the shares of the data, and the maxima of others over all ranks, in float64.

    Every rank passes equally many numbers. The host waits for the device once. Ranks with the same share have the same
    summands, which count once. The maximum of values that include NaN is infinite. The message of the sums carries stop
    requests.
    """
    global _stop_requested
    counts = world().rank % world().group_size == 0 and world().pipeline_rank == 0
    total = _stack([*(sums if counts else [0.0] * len(sums)), float(_stop_requested_here)])
    highest = _stack(maxima).nan_to_num(torch.inf, torch.inf, -torch.inf)
    with observed("reduce_over_ranks", [len(sums) + len(maxima)]):
        if sums and world().size > 1:
            dist.all_reduce(total)
        if maxima and world().size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        numbers = torch.cat([total, highest]).tolist()
    _stop_requested |= bool(sums) and numbers[len(sums)] > 0
    return numbers[: len(sums)], numbers[len(sums) + 1 :]


def _stack(numbers: Sequence[float | Tensor]) -> Tensor:
    """Return numbers as one tensor (n,) fp64 on the device, without waiting for the device."""
    on_host = [0.0 if isinstance(number, Tensor) else number for number in numbers]
    stacked = to_device(torch.tensor(on_host, dtype=torch.float64), world().device)
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            stacked[index] = number.detach()
    return stacked


def sum_over_ranks(value: float) -> float:
    """Return the sum of one number per share of the data (see `reduce_over_ranks`)."""
    return reduce_over_ranks([value])[0][0]


def max_over_ranks(value: float) -> float:
    """Return the largest of one number per rank."""
    return reduce_over_ranks([], [value])[1][0]


def require_equal(value: str, remedy: str) -> None:
    """Raise ValueError on every rank if a text differs between ranks. The ranks compare checksums on the host."""
    if world().size == 1:
        return
    checksum = zlib.crc32(value.encode())
    bounds = torch.tensor([checksum, -checksum])
    with observed("require_equal", bounds.shape):
        dist.all_reduce(bounds, dist.ReduceOp.MAX, _cache["objects"], async_op=True).wait(TIMEOUT)
    if bounds.sum() != 0:
        raise ValueError(f"ranks differ: {value} on rank {world().rank}. {remedy}")


def gather_objects(value: Any) -> list[Any]:
    """Return the objects of all ranks in rank order, on every rank."""
    if world().size == 1:
        return [value]
    gathered: list[Any] = [None] * world().size
    with observed("gather_objects"):
        dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Any, *, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the object of rank `source` of a group (default: of all ranks) on every rank of the group.

    Without a group, the other ranks wait up to a day for the source, which may work for all ranks first.
    """
    if world().size == 1:
        return value
    values = [value]
    with observed("broadcast_object"):
        dist.broadcast_object_list(values, group=group or _cache["objects"], group_src=source)
    return values[0]


def barrier() -> None:
    """Wait until every rank has called this."""
    if world().size > 1:
        with observed("barrier"):
            dist.barrier()


def request_stop() -> None:
    """Request that all ranks stop. A signal handler may call this.

    The next sum over ranks, which every update needs, sends the request to all ranks. All stop after the same step.
    """
    global _stop_requested_here
    _stop_requested_here = True


def stop_requested() -> bool:
    """Return whether a rank had requested a stop at the last sum over ranks: the same on all ranks until the next."""
    return _stop_requested
