"""Run a module on several ranks of this machine. Each rank is a process that prints one JSON object."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed
from benchmarks.record import ROOT
from pipeline.launch.ranks import free_port

LIMIT_SECONDS = 1200.0


def run_ranks(
    module: str, arguments: Sequence[str], ranks: int, *, threads: int = 1, python: Path | str = sys.executable
) -> list[dict[str, Any]]:
    """Run `python -m MODULE ARGUMENTS` on `ranks` ranks of `threads` threads; return the last object of each rank.

    The environment variables of the processes are those of torchrun. Raises BenchFailed if a rank fails, prints no
    object, or exceeds the time limit.
    """
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cpu",  # read by DeepSpeed only
    }
    workers = [
        subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=LIMIT_SECONDS) for worker in workers]
    except subprocess.TimeoutExpired as problem:
        raise BenchFailed(f"{module} did not end within {LIMIT_SECONDS:g} seconds") from problem
    finally:
        for worker in workers:
            worker.kill()
    results = []
    for worker, (output, errors) in zip(workers, outputs, strict=True):
        objects = [line for line in output.splitlines() if line.startswith("{")]
        if worker.returncode or not objects:
            tail = "\n".join(errors.splitlines()[-20:])
            command = f"{module} {' '.join(arguments)}"
            raise BenchFailed(f"{command} ended with status {worker.returncode}, {len(objects)} objects:\n{tail}")
        results.append(json.loads(objects[-1]))
    return results
