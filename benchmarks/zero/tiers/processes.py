"""Workers of this folder as processes of their own, one a rank, that leave one JSON object each."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import BenchFailed
from benchmarks.record import ROOT

LIMIT_SECONDS = 600.0


def run_ranks(module: str, arguments: Sequence[str], ranks: int, *, threads: int = 1) -> list[dict[str, Any]]:
    """`python -m MODULE ARGUMENTS` on `ranks` ranks over Gloo; what each printed last. Raises BenchFailed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [worker.communicate(timeout=LIMIT_SECONDS) for worker in workers]
    except subprocess.TimeoutExpired as problem:
        raise BenchFailed(f"{module} did not end within {LIMIT_SECONDS:g} seconds") from problem
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, told, strict=True):
        if worker.returncode:
            tail = "\n".join(errors.splitlines()[-20:])
            raise BenchFailed(f"{module} {' '.join(arguments)} ended with status {worker.returncode}:\n{tail}")
    return [json.loads(output.splitlines()[-1]) for output, _ in told]
