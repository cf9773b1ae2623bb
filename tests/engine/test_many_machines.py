"""HSDP for real: two hosts with addresses of their own train together, and the losses are those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import EngineConfig
from engine.engine import Engine
from engine.parallel import dist, meshes
from tests import hosts
from tests.engine.test_zero import OPTIMIZER, ROWS, data, seeded_net, squared_error

STEPS, RANKS_A_HOST = 2, 2


def train(shard_ranks: int | None) -> list[float]:
    """The losses of STEPS updates at stage 3, this rank taking every W-th row."""
    torch.set_num_threads(1)
    config = EngineConfig(zero_stage=3, dtype="fp32", shard_ranks=shard_ranks)
    engine = Engine(seeded_net(), config, optimizer=OPTIMIZER)
    world, (inputs, targets) = dist.world(), data()
    return [
        engine.update([(x[world.rank :: world.size], y[world.rank :: world.size])], squared_error, ROWS).loss
        for x, y in zip(inputs[:STEPS], targets[:STEPS], strict=True)
    ]


def main(result: Path) -> None:
    """One rank on one of the hosts."""
    dist.start("hosts", device="cpu")
    mesh = meshes.zero_mesh(stage=3, shard_ranks=RANKS_A_HOST)
    losses = train(RANKS_A_HOST)
    namespace = os.stat("/proc/self/ns/net").st_ino
    found = dist.gather_objects((namespace, mesh["shard"].mesh.tolist(), losses))
    if dist.world().is_rank_zero:
        result.write_text(json.dumps(found))
    dist.stop()


def test_two_hosts_train_as_one_process_does(tmp_path: Path) -> None:
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    result = tmp_path / "result.json"
    with hosts.two_hosts(tmp_path) as both:
        running = [host.start(_torchrun(host, both[0], result), {"OMP_NUM_THREADS": "1"}) for host in both]
        outputs = [_output(process) for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    found = json.loads(result.read_text())
    namespaces, groups = [namespace for namespace, _, _ in found], [shard for _, shard, _ in found]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert groups == [[0, 1], [0, 1], [2, 3], [2, 3]]  # a copy of the model on each host
    alone = train(None)
    for _, _, losses in found:
        assert losses == pytest.approx(alone, rel=1e-6)


def _output(process: subprocess.Popen[str]) -> str:
    """All that it prints; one that does not end is ended."""
    try:
        return process.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.communicate(timeout=30)[0]


def _torchrun(host: hosts.Host, first: hosts.Host, result: Path) -> list[str]:
    """What one types on each of two machines, with the address to be reached at."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={RANKS_A_HOST}",
        "--rdzv-backend=c10d", "--rdzv-id=1", f"--rdzv-endpoint={first.address}:29500", f"--local-addr={host.address}",
        f"--rdzv-conf=is_host={int(host == first)}",  # torchrun compares addresses of names, and no name has this one
        "-m", "tests.engine.test_many_machines", str(result),
    ]  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
