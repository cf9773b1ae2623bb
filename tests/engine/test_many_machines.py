"""HSDP on two simulated hosts with their own addresses gives the losses of one process."""

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
    """Return the losses of STEPS updates under ZeRO-3. Each of the W ranks has every W-th row."""
    torch.set_num_threads(1)
    config = EngineConfig(zero_stage=3, dtype="fp32", shard_ranks=shard_ranks)
    engine = Engine(seeded_net(), config, optimizer=OPTIMIZER)
    world, (inputs, targets) = dist.world(), data()
    return [
        engine.update([(x[world.rank :: world.size], y[world.rank :: world.size])], squared_error, ROWS).loss
        for x, y in zip(inputs[:STEPS], targets[:STEPS], strict=True)
    ]


def main(result: Path) -> None:
    """Run one rank on one of the hosts."""
    dist.start("hosts", device="cpu")
    mesh = meshes.zero_mesh(stage=3, shard_ranks=RANKS_A_HOST)
    losses = train(RANKS_A_HOST)
    namespace = os.stat("/proc/self/ns/net").st_ino
    actual = dist.gather_objects((namespace, mesh["shard"].mesh.tolist(), losses))
    if dist.is_rank_zero():
        result.write_text(json.dumps(actual))
    dist.stop()


def test_two_hosts_train_like_one_process(tmp_path: Path) -> None:
    reason = hosts.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    result = tmp_path / "result.json"
    with hosts.two_hosts(tmp_path) as both:
        running = [host.start(_torchrun(host, both[0], result), {"OMP_NUM_THREADS": "1"}) for host in both]
        outputs = [_output(process) for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    actual = json.loads(result.read_text())
    namespaces, groups = [namespace for namespace, _, _ in actual], [shard for _, shard, _ in actual]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert groups == [[0, 1], [0, 1], [2, 3], [2, 3]]  # one replica of the model on each host
    one_process = train(None)
    for _, _, losses in actual:
        assert losses == pytest.approx(one_process, rel=1e-6)


def _output(process: subprocess.Popen[str]) -> str:
    """Return the output of a process. Kill the process if it does not end."""
    try:
        return process.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.communicate(timeout=30)[0]


def _torchrun(host: hosts.Host, first: hosts.Host, result: Path) -> list[str]:
    """Return the command of one of two machines, with the address of the first."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={RANKS_A_HOST}",
        "--rdzv-backend=c10d", "--rdzv-id=1", f"--rdzv-endpoint={first.address}:29500", f"--local-addr={host.address}",
        f"--rdzv-conf=is_host={int(host == first)}",  # torchrun compares host names; no name has this address
        "-m", "tests.engine.test_many_machines", str(result),
    ]  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
