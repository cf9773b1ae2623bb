"""The process group: restarted ranks on the store of their first start."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore, TCPStore
from torch.distributed.tensor import DTensor, Replicate, Shard

from engine.parallel import dist, dtensors, meshes
from tests.ranks import run_ranks
from tests.simulated_gpu import building


def sum_of_ranks() -> float:
    return dist.sum_over_ranks(float(dist.world().rank + 1))


def test_restarted_ranks_ignore_the_keys_of_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, torchrun starts new processes on the store that has the addresses of the first ones."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert run_ranks(sum_of_ranks, 2, store=store) == [3.0] * 2
        assert not store.check(["exception_dump"])
        store.set("exception_dump", "rank")  # as NCCL does after an error, in all process groups of the store


@pytest.mark.parametrize(("size", "expected"), [(1, None), (2, torch.device("cuda", 0))])
def test_nccl_connects_several_ranks_at_the_start(
    size: int, expected: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank calls no collective, and NCCL cannot connect it on some machines (deepspeedai/DeepSpeed#8248)."""
    bound = list[torch.device | None]()

    def join(**arguments: Any) -> None:
        bound.append(arguments["device_id"])
        raise ConnectionError

    for name, value in {"WORLD_SIZE": str(size), "RANK": "0", "TORCH_DIST_USE_NCCL2": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_: iter([(HashStore(), 0, size)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setattr(dist, "_choose_interface", lambda *_: None)
    monkeypatch.setattr(dist, "_world", None)  # an earlier test of the process may have joined a group
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(ConnectionError):
        dist.start(device="cuda")
    assert bound == [expected]


@pytest.mark.parametrize(("own", "set_by_user", "expected"), [
    ("10.77.0.2", {}, {"GLOO": "eth7", "NCCL": "eth7"}),
    ("10.77.0.2", {"NCCL": "ib0"}, {"GLOO": "eth7", "NCCL": "ib0"}),
    ("127.0.0.1", {}, {"GLOO": "lo", "NCCL": "lo"}),
    ("fe80::1", {}, {"GLOO": "eth8", "NCCL": "eth8"}),
])  # fmt: skip
def test_gloo_and_nccl_use_the_interface_with_the_route_to_the_first_rank(
    own: str,
    set_by_user: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last rank resolves the name of the first machine, which may be 127.0.1.1 on that machine itself."""
    addresses = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth7": ["10.77.0.2"], "eth8": ["fe80::1%eth8"]}
    listed = {name: [SimpleNamespace(address=each) for each in found] for name, found in addresses.items()}
    store, connected = HashStore(), list[Any]()

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            connected.append(address)

        def getsockname(self) -> Any:
            return own, 1

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 2, 17, "", ("10.77.0.1", 0))])
    for rank in (1, 0):
        of_user = {f"{library}_SOCKET_IFNAME": name for library, name in set_by_user.items()}
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "first", **of_user})
        dist._choose_interface(store, rank, 2)
        assert {library: os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")} == expected
    assert connected == [("10.77.0.1", 1)] * 2
    lines = capsys.readouterr().out.splitlines()
    if own == "127.0.0.1":
        assert not lines
    else:
        gloo, nccl = expected.values()
        assert len(lines) == 1 and f"({own}); GLOO_SOCKET_IFNAME={gloo}, NCCL_SOCKET_IFNAME={nccl}" in lines[0]


def reductions() -> tuple[Any, ...]:
    """Return what this rank gets from others: numbers on the device and on the host, and a large object."""
    rank = dist.world().rank
    numbers = torch.tensor([rank + 0.5, float("nan") if rank else 1.0], device=dist.world().device)
    reduced = dist.reduce_over_ranks([numbers[0], 2.0**-40 * rank], [rank, -numbers[0], numbers[1]])
    large = dist.broadcast_object(bytes(range(256)) * 16 if rank == 0 else None)
    default = torch.distributed.get_backend()
    mesh = meshes.zero_mesh(stage=3)
    of_rank = DTensor.from_local(
        torch.full((2, 3), float(rank), device=dist.world().device), mesh, [Replicate(), Shard(0)]
    )
    on_host = dtensors.full_tensor(of_rank.to("cpu"))  # offload has the shards there, and NCCL cannot gather them there
    assert on_host.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    return reduced, large == bytes(range(256)) * 16, default, torch.distributed.get_backend(dist.checkpoint_group())


def timeouts_of_meshes() -> set[timedelta]:
    dist.TIMEOUT = timedelta(minutes=7)  # torch's default for Gloo is the same as ours
    found = [meshes.zero_mesh(stage=3), meshes.zero_mesh(stage=0), meshes.tensor_mesh(1)]
    groups = [mesh.get_group(dim) for mesh in found for dim in range(mesh.ndim)]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_the_groups_of_meshes_have_the_timeout_of_all_groups() -> None:
    """torch gives them the default of the backend, which is ten minutes for NCCL."""
    assert run_ranks(timeouts_of_meshes, 2) == [{timedelta(minutes=7)}] * 2


def number_of_groups() -> tuple[int, list[int]]:
    """Return how many groups this rank has, and the ranks of its group of first and last stages."""
    dist.set_parallelism(pipeline=3)
    ends = meshes.first_and_last_stage_group()
    ranks = [] if ends is None else torch.distributed.get_process_group_ranks(ends)
    return len(torch.distributed.distributed_c10d._world.pg_names), ranks


def test_all_ranks_have_equally_many_groups() -> None:
    """torch names a split group by this number and destroys groups by name, and NCCL needs one order on all ranks."""
    counts, ends = zip(*run_ranks(number_of_groups, 3), strict=True)
    assert len(set(counts)) == 1 and ends == ([0, 2], [], [0, 2])


def test_numbers_and_objects_of_ranks() -> None:
    expected = [2.0, 2.0**-40], [1.0, -0.5, float("inf")]
    assert run_ranks(reductions, 2) == [(expected, True, "gloo", "gloo")] * 2


@pytest.mark.skipif(building.unavailable_reason() is not None, reason=str(building.unavailable_reason()))
def test_gpus_exchange_numbers_over_nccl_and_objects_of_one_rank_over_gloo() -> None:
    expected = [2.0, 2.0**-40], [1.0, -0.5, float("inf")]
    assert run_ranks(reductions, 2, device="cuda") == [(expected, True, "simulated", "gloo")] * 2
