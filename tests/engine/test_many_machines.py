"""HSDP on two simulated hosts with their own addresses gives the losses of one process."""

import ctypes
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine import EngineConfig
from engine.engine import Engine
from engine.parallel import dist, meshes
from tests import hosts
from tests.engine.test_zero import OPTIMIZER, ROWS, data, seeded_net, squared_error
from tests.ranks import Worker

STEPS, RANKS_A_HOST = 2, 2
PR_SET_PDEATHSIG = 1


def train(shard_ranks: int | None) -> list[float]:
    """Return the losses of STEPS updates under ZeRO-3. Each of the W ranks has every W-th row."""
    torch.set_num_threads(1)
    config = EngineConfig(zero_stage=3, dtype="fp32", shard_ranks=shard_ranks)
    engine = Engine(seeded_net(), config, optimizer=OPTIMIZER)
    world, (inputs, targets) = dist.world(), data()
    return [
        engine.update([(x[world.rank :: world.size], y[world.rank :: world.size])], squared_error, ROWS).loss
        for x, y in zip(inputs[:STEPS], targets[:STEPS], strict=True)
    ]


def run_rank(result: Path) -> None:
    """Run one rank on one of the hosts. It ends with its launcher, also when a timeout kills that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    dist.start("hosts", device="cpu")
    mesh = meshes.zero_mesh(stage=3, shard_ranks=RANKS_A_HOST)
    losses = train(RANKS_A_HOST)
    namespace = os.stat("/proc/self/ns/net").st_ino
    actual = dist.gather_objects((namespace, mesh["shard"].mesh.tolist(), losses))
    if dist.is_rank_zero():
        result.write_text(json.dumps(actual))
    dist.stop()


def torchrun(host: hosts.Host, first: hosts.Host, result: Path) -> None:
    """Do what torchrun does on one of two machines, but fork the ranks, because new interpreters take seconds."""
    host.enter()
    configuration = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=RANKS_A_HOST,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{first.address}:29500",
        rdzv_configs={"is_host": host == first},  # torchrun compares host names; no name has this address
        local_addr=host.address,
        run_id="1",
        start_method="fork",
    )
    elastic_launch(configuration, run_rank)(result)


def test_two_hosts_train_like_one_process(tmp_path: Path) -> None:
    reason = hosts.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    result = tmp_path / "result.json"
    with hosts.two_hosts(tmp_path) as both:
        running = [Worker(torchrun, host, both[0], result, environment={"OMP_NUM_THREADS": "1"}) for host in both]
        outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    actual = json.loads(result.read_text())
    namespaces, groups = [namespace for namespace, _, _ in actual], [shard for _, shard, _ in actual]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert groups == [[0, 1], [0, 1], [2, 3], [2, 3]]  # one replica of the model on each host
    one_process = train(None)
    for _, _, losses in actual:
        assert losses == pytest.approx(one_process, rel=1e-6)
